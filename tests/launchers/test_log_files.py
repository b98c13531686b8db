"""The output of a rank goes to its file, and that of rank 0 to the screen as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK_0 = """
import os, signal, time
import psutil
from distcore.launchers.processes.log_files import log_to_file
log_to_file(0)
print("trains", flush=True)
tees = psutil.Process().children()
while any(tee.name() != "tee" for tee in tees):
    time.sleep(0.01)
for tee in tees:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        tee.send_signal(number)
time.sleep(0.3)
print("stopped after step 5", flush=True)
"""


@pytest.mark.programs
@pytest.mark.skipif(sys.platform == "win32", reason="no tee")
def test_signals_to_all_that_a_rank_has_started_leave_its_last_words(tmp_path: Path) -> None:
    environ = {**os.environ, "DISTCORE_LOG_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", RANK_0], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "trains\nstopped after step 5\n"), done.stderr
    assert (tmp_path / "rank-0.log").read_text() == done.stdout

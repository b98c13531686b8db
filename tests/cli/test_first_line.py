"""Something is on the screen within two seconds, also where importing torch takes longer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLOW = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            end = time.monotonic() + 20
            while time.monotonic() < end:
                {wait}
sys.meta_path.insert(0, Slow())
"""


def seconds_to_the_first_line(
    folder: Path, module: str, wait: str, *words: str
) -> tuple[float, str]:
    (folder / "sitecustomize.py").write_text(SLOW.format(module=module, wait=wait))
    environment = os.environ | {"PYTHONPATH": str(folder)}
    begun = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "distcore", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        seconds = time.monotonic() - begun
        process.kill()
    return seconds, line


@pytest.mark.programs
@pytest.mark.parametrize(
    ("module", "wait", "words", "line"),
    [
        (
            "torch",
            "sum(range(10**6))",
            "train --max-steps 1",
            "distcore train: starting\n",
        ),
        pytest.param(
            "rich.console",
            "time.sleep(0.1)",
            "tasks",
            "distcore tasks: starting\n",
            marks=pytest.mark.needs("distcore-workbench"),
        ),
    ],
    ids=["torch", "another"],
)
def test_a_slow_import_is_announced(
    tmp_path: Path, module: str, wait: str, words: str, line: str
) -> None:
    seconds, said = seconds_to_the_first_line(tmp_path, module, wait, *words.split())
    assert said == line
    begun = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "distcore", "--version"], check=True, stdout=subprocess.DEVNULL
    )
    # what a busy machine takes to start Python, which it may do faster another time
    start = time.monotonic() - begun
    assert seconds < 2 + 2 * start


@pytest.mark.ranks
def test_the_first_line_is_written_by_one_rank() -> None:
    words = [sys.executable, "-m", "distcore", "train", "--strategy", "nowhere"]
    ranks = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | ranks)
    assert "starting" not in done.stderr

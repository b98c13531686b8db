"""A hang that was named ends: by a signal, which a thread hears while the run's own hangs,
or as a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distcore import DistcoreError, RunConfig, train
from distcore.testing.problem import Problem
from distcore_workbench.watchdog.stop_signals import StopSignals

ENDS = 40.0
"""Seconds after a signal in which a hang that was named ends: 15 (``benchmarks/hangs.py``),
and a busy machine's.
"""
HANGS_ONCE = """
import os
import threading
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from distcore import Simple, hookimpl

class Line(Simple):
    def data(self):
        x = torch.linspace(-1, 1, 64)[:, None]
        return TensorDataset(x, 3 * x), TensorDataset(x[::8], 3 * x[::8])

    def model(self):
        return torch.nn.Linear(1, 1)

    def row_loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square()[:, 0]

    @hookimpl
    def on_step_end(self, progress):
        if progress.step == 3 and not Path("hung").exists():
            Path("hung").touch()
            threading.Event().wait()
"""

COMMAND = [
    sys.executable,
    "-m",
    "distcore",
    "train",
    "--task",
    "own.py:Line",
    "--lr",
    "0.1",
    "--max-steps",
    "5",
    "--global-batch-size",
    "8",
    "--out",
    "run",
    "--prove",
    "off",
    "--set",
    "extensions.watchdog.limit=3",
]
IN_A_LOCK = HANGS_ONCE.replace(
    "progress.step == 3 and", "progress.step == 3 and os.environ['RANK'] == '1' and"
)


def test_a_signal_is_heard_by_another_thread() -> None:
    """Its handler has not run: this thread executes nothing between the signal and the question."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    stops = StopSignals()
    try:
        stops.listen()
        assert not stops.is_asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.is_asked()
        assert stops.is_asked(), "a signal was forgotten"
    finally:
        stops.close()
        signal.signal(signal.SIGTERM, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_run_hears_signals_after_one_that_failed() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    failed, stops = StopSignals(), StopSignals()
    try:
        failed.listen()
        stops.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.is_asked()
        failed.close()  # changes nothing
        assert signal.set_wakeup_fd(-1) != -1
    finally:
        stops.close()
        signal.signal(signal.SIGTERM, before)


def test_a_program_that_listens_itself_keeps_its_descriptor() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        stops = StopSignals()
        stops.listen()
        stops.close()
        assert signal.set_wakeup_fd(write) == write
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def test_an_end_without_a_limit_is_refused() -> None:
    options = {"limit": 0, "end": True}
    with pytest.raises(DistcoreError, match=r"extensions\.watchdog\.end: needs a limit above 0"):
        train(RunConfig.model_validate({"lr": 0.1, "extensions": {"watchdog": options}}), Problem())


@pytest.mark.ranks
@pytest.mark.programs
@pytest.mark.parametrize(("restarts", "code"), [("0", 3), ("1", 0)])
def test_a_hang_is_a_failure_where_the_watchdog_ends_it(
    tmp_path: Path, restarts: str, code: int
) -> None:
    (tmp_path / "own.py").write_text(HANGS_ONCE)
    command = [*COMMAND, "--max-restarts", restarts, "--set", "extensions.watchdog.end=true"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stderr
    assert "rank 0 has been in hook on_step_end() for 3 s, in step 3" in done.stderr
    assert (tmp_path / "run/report.json").exists() is (code == 0)
    assert ("restart 1 of 1" in done.stderr) is (code == 0)


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
@pytest.mark.programs
def test_a_hang_that_was_named_ends_by_ctrl_c_and_the_others_save(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the launcher and to all ranks at once."""
    (tmp_path / "own.py").write_text(IN_A_LOCK)
    said = tmp_path / "said"
    command = [*COMMAND, "--strategy", "ddp", "--nproc", "2"]
    with said.open("w") as file:
        job = subprocess.Popen(
            command, cwd=tmp_path, stdout=file, stderr=file, start_new_session=True
        )
    try:
        named = "rank 1 is missing for 3 s in hook on_step_end()"
        deadline = time.monotonic() + 200
        while named not in said.read_text():
            assert job.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.2)
        os.killpg(job.pid, signal.SIGINT)
        job.wait(ENDS)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert job.returncode == 128 + signal.SIGINT, said.read_text()
    assert (tmp_path / "run/checkpoints/step-00000003").is_dir(), said.read_text()
    assert "Traceback" not in said.read_text()

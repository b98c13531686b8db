"""SIGTERM, whoever gets it and whenever: ranks agree on a step, commit a checkpoint, exit 143,
and go on exactly.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from resume_job import start, wait_for

from distcore.checkpoint import Checkpoint, read_tensors

pytestmark = pytest.mark.ranks

RANKS = ("nproc=2", "strategy=ddp")
LAST = "checkpoints/step-00000015"


@pytest.fixture(scope="module")
def two_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen steps of two ranks."""
    out = tmp_path_factory.mktemp("two-undisturbed")
    _, told = start(out, *RANKS).communicate(timeout=100)
    assert (out / LAST).exists(), told
    return out


def stepping(out: Path) -> bool:
    return (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0


def saving(out: Path) -> bool:
    return any(out.glob("checkpoints/.writing-*"))


def pid_of(whom: str, launcher: int) -> int:
    """Ranks are the launcher's children, in the order in which they were started."""
    ranks = sorted(psutil.Process(launcher).children(), key=lambda child: child.create_time())
    return {"launcher": launcher, "rank 0": ranks[0].pid, "rank 1": ranks[1].pid}[whom]


def saved(out: Path) -> bool:
    return any(out.glob("checkpoints/step-*"))


SETTINGS: dict[Callable[[Path], bool], tuple[str, ...]] = {
    saving: ("save_every=2",),
    saved: ("save_every=2", "log_every=100"),
    stepping: ("save_every=100",),
}
"""With its first checkpoint a job that does not log stops at another save."""
CASES = [
    ("launcher", 1, stepping),
    ("rank 0", 2, saving),
    ("rank 1", 1, saved),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("rank 0", 1, stepping),
            ("rank 1", 1, stepping),
            ("launcher", 2, stepping),
            ("launcher", 1, saving),
            ("rank 1", 1, saving),
        )
    ),
]


@pytest.mark.needs("distcore-tasks")
@pytest.mark.parametrize("ranks", [RANKS, ("nproc=1",)], ids=["two ranks", "one process"])
def test_a_closed_terminal_is_a_committed_checkpoint(
    tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    process = start(tmp_path, *ranks, "seconds_a_step=0.05", *SETTINGS[stepping])
    wait_for(partial(stepping, tmp_path), process)
    for pid in (process.pid, *(child.pid for child in psutil.Process(process.pid).children())):
        os.kill(pid, signal.SIGHUP)  # the kernel sends it to all of them
    _, told = process.communicate(timeout=100)
    assert process.returncode == 129, told
    step = Checkpoint(max(tmp_path.glob("checkpoints/*"))).job_state()["progress"]["step"]
    assert told.splitlines() == [f"stopped after step {step} of 15; go on with resume='auto'"]


@pytest.mark.needs("distcore-tasks")
@pytest.mark.parametrize(("whom", "times", "moment"), CASES)
def test_sigterm_is_a_committed_checkpoint_and_143_and_goes_on_bit_for_bit(
    two_undisturbed: Path, tmp_path: Path, whom: str, times: int, moment: Callable[[Path], bool]
) -> None:
    process = start(tmp_path, *RANKS, "seconds_a_step=0.05", *SETTINGS[moment])
    wait_for(partial(moment, tmp_path), process)
    for _ in range(times):
        os.kill(pid_of(whom, process.pid), signal.SIGTERM)
    _, told = process.communicate(timeout=100)
    assert process.returncode == 143, told
    newest = max(tmp_path.glob("checkpoints/*"))
    step = Checkpoint(newest).job_state()["progress"]["step"]
    assert step < 15, "not only at the last step, which logs"
    acknowledged = ["stopping at the next log line or sooner"] if whom == "launcher" else []
    assert told.splitlines() == [
        *acknowledged,
        f"stopped after step {step} of 15; go on with resume='auto'",
    ]
    assert not (tmp_path / "errors").exists(), "a stop in order is no failure to look into"
    _, told = start(tmp_path, *RANKS, "resume=auto").communicate(timeout=100)
    resumed, expected = read_tensors(tmp_path / LAST), read_tensors(two_undisturbed / LAST)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected), told

"""A small training that is killed and resumed: resume_job.py OUT [KEY=VALUE ...];
seconds_a_step slows it down.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from exits import exit_on_error
from torch import Tensor, nn

from distcore import RunConfig, launch, train
from distcore.config import parse_settings
from distcore.plugin.task.task import OnResume
from distcore.testing.problem import Problem

SCRIPT = __file__
SETTINGS: dict[str, Any] = {
    "global_batch_size": 12,
    "lr": 0.01,
    "epochs": 3,
    "save_every": 4,
    "log_every": 1,
    "schedule": {"name": "linear", "warmup_steps": 2},
    "checkpoints": {"keep_last": 3, "best": None},
    "extensions": {"progress": False},
    "device": "cpu",
    "log_level": "error",
}
"""Fifteen steps; the third epoch begins after ten, each ends with a ragged batch of two rows."""


@dataclass(frozen=True, kw_only=True)
class Slow(Problem):
    """The laws' problem with dropout, and ``seconds`` of sleep per micro-batch."""

    on_resume: ClassVar[dict[str, OnResume]] = {"seconds": "free", "rows": "free", "tied": "free"}
    seconds: float = 0.0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(self.seconds)
        return super().loss(model, batch)


def at_step(step: int, undisturbed: Path, out: Path) -> Path:
    """Fill ``out`` with what the undisturbed run would have left if it had
    been killed after ``step``.
    """
    for path in undisturbed.glob("checkpoints/*"):
        if int(path.name[-8:]) <= step:
            shutil.copytree(path, out / "checkpoints" / path.name)
    return out


def start(out: Path, *settings: str) -> subprocess.Popen[str]:
    """Start the job in a process of its own; what it says to the user comes
    through its standard error.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", SCRIPT, str(out), *settings]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 100
) -> None:
    """Wait until ``condition`` holds; fails when ``process`` ends before
    that, or after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run(
    out: Path, seconds: float = 0.0, rows: int = 50, tied: bool = False, **changes: Any
) -> None:
    """Train in this process, or on several ranks."""
    config = RunConfig.model_validate(SETTINGS | {"out": str(out)} | changes)
    task = Slow(dropout=0.1, seconds=seconds, rows=rows, tied=tied)
    if config.nproc == "auto":
        train(config, task)
    else:
        launch(
            partial(_train, config, task),
            nproc=config.nproc,
            errors=out / "errors",
            grace_period=30,
        )


def _train(config: RunConfig, task: Slow) -> None:
    train(config, task)


if __name__ == "__main__":
    settings = parse_settings(sys.argv[2:])
    with exit_on_error():
        run(Path(sys.argv[1]), settings.pop("seconds_a_step", 0.0), **settings)

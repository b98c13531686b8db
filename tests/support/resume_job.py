"""A small training that is killed and resumed: resume_job.py OUT [KEY=VALUE ...]; seconds_a_step slows it down."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from distcore import RunConfig, launch, train
from distcore.config import parse_settings
from distcore.launchers import one_line_errors
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
    """The laws' problem with dropout, at some seconds a micro-batch."""

    seconds: float = 0.0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(self.seconds)
        return super().loss(model, batch)


def run(out: Path, seconds: float = 0.0, rows: int = 50, tied: bool = False, **changes: Any) -> None:
    """Train in this process, or on several ranks."""
    config = RunConfig.model_validate(SETTINGS | {"out": str(out)} | changes)
    task = Slow(dropout=0.1, seconds=seconds, rows=rows, tied=tied)
    if config.nproc == "auto":
        train(config, task)
    else:
        launch(partial(_train, config, task), nproc=config.nproc, errors=out / "errors", grace_period=30)


def _train(config: RunConfig, task: Slow) -> None:
    train(config, task)


if __name__ == "__main__":
    settings = parse_settings(sys.argv[2:])
    with one_line_errors():
        run(Path(sys.argv[1]), settings.pop("seconds_a_step", 0.0), **settings)

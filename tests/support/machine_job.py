"""The job of tests on several machines: a slow copy of the laws' problem,
compared with one process.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from distcore.plugin.task.task import OnResume
from distcore.testing.problem import Problem

FLAGS = (
    f"--task {__file__}:Slow --device cpu --lr 0.01 --set schedule.name=constant"
    " --global-batch-size 8 --log-every 1 --eval-every 100000 --save-every 5 --set"
    " task_options.rows=2000"
)
STEPS = 120
"""Steps of the run in one process that the others are compared with; they may be shorter."""
CLOSE = 1e-6
"""Largest difference of two losses."""


@dataclass(frozen=True, kw_only=True)
class Slow(Problem):
    """The laws' problem with ``seconds`` of sleep per micro-batch."""

    on_resume: ClassVar[dict[str, OnResume]] = {"seconds": "free"}
    seconds: float = 0.0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(self.seconds)
        return super().loss(model, batch)


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step of a run folder; a step that was done twice counts
    as it was done last.
    """
    by_step = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "train/loss" in row:
            by_step[row["step"]] = row["train/loss"]
    return by_step


def is_same(run: Path, reference: Path, steps: int) -> None:
    """Assert that a run has all losses of the first ``steps`` steps, those of ``reference``."""
    actual, expected = losses(run), losses(reference)
    assert sorted(actual) == list(range(1, steps + 1))
    worst = max(abs(actual[step] - expected[step]) for step in actual)
    assert worst <= CLOSE, (worst, actual)

"""Law 7: a run that was interrupted and resumed equals one that was not interrupted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from distcore import checkpoint
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.task.task import Datasets
from distcore.testing.findings import EXACT, FP32, Measured
from distcore.testing.lab import BY_TOKENS, Job, Lab, Trained
from distcore.testing.laws.gradient import needs_phases
from distcore.testing.problem import Problem, RandomRows
from distcore.testing.reference import largest_difference
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.variants import Phased

PROBLEM = Problem(dropout=0.2)
CHANGES: dict[str, Any] = BY_TOKENS | {
    "schedule": {"name": "linear", "warmup_steps": 2},
    "max_steps": 8,
    "clip": {"norm": 0.5},
}


@STRATEGIES.law("resume")
def mid_epoch(lab: Lab) -> Measured:
    """A run with dropout that is resumed in the middle of an epoch equals an uninterrupted run."""
    return _compare_with_uninterrupted(lab, FP32)


@STRATEGIES.law("resume")
def bit_for_bit(lab: Lab) -> Measured:
    """A run with dropout that is resumed in the middle of an epoch equals an uninterrupted
    run bit for bit.
    """
    return _compare_with_uninterrupted(lab, EXACT)


@STRATEGIES.law("resume")
def phases_continue(lab: Lab) -> Measured:
    """A run in phases that is resumed equals an uninterrupted run bit for bit."""
    needs_phases(lab)
    return _compare_with_uninterrupted(lab, EXACT, Phased(dropout=0.2))


@STRATEGIES.law("resume")
def each_row_once(lab: Lab) -> Measured:
    """A resumed run reads the rows of the remaining steps, each once, and no others."""
    job, _ = _interrupt(lab)
    plan = training_plan(job.run.config, job.data.train)
    due = [row for step in range(3, plan.steps) for row in plan.rows(0, step).tolist()]
    due += [row for step in range(8 - plan.steps) for row in plan.rows(1, step).tolist()]
    read = [
        row for rows in lab.share(_read(job) if lab.world.is_shard_leader else []) for row in rows
    ]
    wrong = sum(((Counter(read) - Counter(due)) + (Counter(due) - Counter(read))).values())
    return Measured(
        error=wrong, bound=EXACT, note=f"{len(read)} rows read after resuming, {len(due)} were due"
    )


def _compare_with_uninterrupted(lab: Lab, bound: float, problem: Problem = PROBLEM) -> Measured:
    whole = _job(lab, problem).train(8)
    _, resumed = _interrupt(lab, problem)
    error, where = largest_difference(resumed.state, whole.state)
    losses = zip(resumed.losses, whole.losses[3:], strict=True)
    error = max(error, *(abs(a - b) / abs(b) for a, b in losses))
    if resumed.progress != whole.progress:
        return Measured(
            error=float("inf"),
            bound=bound,
            note=f"ended at {resumed.progress}, not {whole.progress}",
        )
    return Measured(error=error, bound=bound, note=f"worst tensor {where}")


def _interrupt(lab: Lab, problem: Problem = PROBLEM) -> tuple[Job, Trained]:
    first = _job(lab, problem)
    path = first.save(first.train(3).progress)
    second = _job(lab, problem)
    progress, _ = checkpoint.load(second.run, second.hooks, path)
    return second, second.train(8 - progress.step, progress)


def _job(lab: Lab, problem: Problem) -> Job:
    problem = replace(problem, rows=4 * lab.global_batch + lab.world.size)
    data = problem.prepare(lab.config())
    counted = Counted(problem.rows)
    return lab.job(
        problem, data=Datasets(train=counted, evaluation=data.evaluation, test=data.test), **CHANGES
    )


class Counted(RandomRows):
    """A dataset that records the rows that are read."""

    def __init__(self, rows: int) -> None:
        """Make up ``rows`` sequences, as ``RandomRows`` does."""
        super().__init__(rows)
        self.read: list[int] = []
        """Numbers of the rows that were read, in order; a row counts again each time."""

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Record and collate the rows ``indices``, as ``Rows.batch`` does."""
        self.read += indices.tolist()
        return super().batch(indices)


def _read(job: Job) -> list[int]:
    assert isinstance(job.data.train, Counted)
    return job.data.train.read

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

STEPS = 8
"""Optimizer steps of a run: more than an epoch has."""
CUT = 3
"""Step after which a run is interrupted: in the first epoch, while the rate falls."""
PROBLEM = Problem(dropout=0.2)
CHANGES: dict[str, Any] = BY_TOKENS | {
    "schedule": {"name": "linear", "warmup_steps": 2},
    "max_steps": STEPS,
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
    remaining_of_first_epoch = [plan.rows(0, step) for step in range(CUT, plan.steps)]
    begin_of_second_epoch = [plan.rows(1, step) for step in range(STEPS - plan.steps)]
    due: Counter[int] = Counter()
    for rows in (*remaining_of_first_epoch, *begin_of_second_epoch):
        due.update(rows.tolist())
    # Other ranks of a data shard read the leader's rows again.
    mine = _read(job) if lab.world.is_shard_leader else []
    read: Counter[int] = Counter()
    for rows_of_rank in lab.share(mine):
        read.update(rows_of_rank)
    wrong = ((read - due) + (due - read)).total()
    note = f"{read.total()} rows read after resuming, {due.total()} were due"
    return Measured(error=wrong, bound=EXACT, note=note)


def _compare_with_uninterrupted(lab: Lab, bound: float, problem: Problem = PROBLEM) -> Measured:
    """Compare the state at the end, and the losses of the steps after the resume."""
    whole = _job(lab, problem).train(STEPS)
    _, resumed = _interrupt(lab, problem)
    error, where = largest_difference(resumed.state, whole.state)
    for loss, expected in zip(resumed.losses, whole.losses[CUT:], strict=True):
        error = max(error, abs(loss - expected) / abs(expected))
    if resumed.progress != whole.progress:
        note = f"ended at {resumed.progress}, not {whole.progress}"
        return Measured(error=float("inf"), bound=bound, note=note)
    return Measured(error=error, bound=bound, note=f"worst tensor {where}")


def _interrupt(lab: Lab, problem: Problem = PROBLEM) -> tuple[Job, Trained]:
    """Save after ``CUT`` steps; return the job that resumes, and the result of its own steps."""
    first = _job(lab, problem)
    path = first.save(first.train(CUT).progress)
    second = _job(lab, problem)
    progress, _ = checkpoint.load(second.run, second.hooks, path)
    return second, second.train(STEPS - progress.step, progress)


def _job(lab: Lab, problem: Problem) -> Job:
    """Build a run whose second epoch begins after the cut, and whose rows count their reads."""
    problem = replace(problem, rows=4 * lab.global_batch + lab.world.size)
    data = problem.prepare(lab.config())
    counted = Datasets(train=Counted(problem.rows), evaluation=data.evaluation, test=data.test)
    return lab.job(problem, data=counted, **CHANGES)


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
    """Return the training rows that this rank has read, in order."""
    assert isinstance(job.data.train, Counted)
    return job.data.train.read

"""Law 8: what ranks must agree on they agree on, or the run ends with one line that names the rank."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from distcore.data.loader import MicroBatches, one_step
from distcore.distributed.agreement import check_agreed, check_rows, check_world
from distcore.errors import AgreementError, RankError
from distcore.launchers import launch
from distcore.plugin.contract import Progress, Run
from distcore.plugin.hookspecs import hookimpl
from distcore.plugin.sampling import rank_sampler, training_plan
from distcore.testing.cases import EXACT, Measured, Skip, job_law, law
from distcore.testing.lab import JobLab, Lab
from distcore.testing.problem import Problem
from distcore.testing.rank import Subject, lab_of

FAILED = "failed on purpose"
SECONDS = 5.0
"""From the failure of a rank to the end of the job."""


@law("agreement")
def true_world(lab: Lab) -> Measured:
    """The backend's world is the one that was started, ranks answer in order, and one per data shard speaks."""
    run = lab.job(Problem()).run
    check_world(run, lab.hooks, lab.rank_info)
    return Measured(error=0, bound=EXACT, note=f"{lab.world.size} ranks answer")


@law("agreement")
def disagreement_is_named(lab: Lab) -> Measured:
    """A fact that differs on the last rank is an error on every rank that names the fact and that rank."""
    last = _last_rank(lab)
    run = lab.job(Problem()).run
    try:
        check_agreed(run, lab.hooks, same="same", fact=lab.world.rank == last)
    except AgreementError as error:
        named = f"disagree on fact: rank {last} " in str(error)
        return Measured(error=not named, bound=EXACT, note=str(error))
    return Measured(error=1, bound=EXACT, note="nobody noticed")


@law("agreement")
def same_rows_are_noticed(lab: Lab) -> Measured:
    """Ranks that train on the same rows are stopped in their first step."""
    _last_rank(lab)
    job = lab.job(Problem())
    plan = training_plan(job.run.config, job.data.train)
    sampler = rank_sampler(plan, 0, lab.world.size)
    micros = one_step(MicroBatches(job.data.train, sampler, job.run.config).stream(0, range(1)))
    try:
        check_rows(job.run, lab.hooks, micros, plan.rows(0, 0))
    except AgreementError as error:
        return Measured(error=0, bound=EXACT, note=str(error))
    return Measured(error=1, bound=EXACT, note="nobody noticed")


@job_law("agreement")
def failing_rank_ends_job(lab: JobLab) -> Measured:
    """A rank that raises in its second step ends the job, which names it; measured in seconds."""
    size = int(lab.subject.config.nproc)
    if size == 1:
        raise Skip("one rank has no others to end")
    with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
        try:
            launch(_train_until_failure, lab.subject, Path(folder), nproc=size, timeout=12 * SECONDS)
        except RankError as error:
            failed = Path(folder, FAILED)
            seconds = time.time() - failed.stat().st_mtime if failed.exists() else float("inf")
            named = f"rank {size - 1} of {size} failed: ValueError: {FAILED}" in str(error)
            return Measured(error=seconds if named else float("inf"), bound=SECONDS, note=f"seconds; {error}")
    return Measured(error=float("inf"), bound=SECONDS, note="the job ended as if nothing had happened")


def _train_until_failure(subject: Subject, folder: Path) -> None:
    with lab_of(subject, folder, {"failing": _Failing(folder)}) as lab:
        lab.job(Problem()).train(10)


class _Failing:
    """Raises on the last rank, in the second step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress) -> None:
        if progress.step == 2 and run.world.rank == run.world.size - 1:
            (self._folder / FAILED).touch()
            raise ValueError(FAILED)


def _last_rank(lab: Lab) -> int:
    if lab.world.size == 1:
        raise Skip("one rank agrees with itself")
    return lab.world.size - 1

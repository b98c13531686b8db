"""Law 8: ranks agree on everything that must be equal, or the run ends with one line
that names the rank.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from distcore.distributed.agreement import check_agreed, check_rows, check_world
from distcore.engine.loader import MicroBatches, one_step
from distcore.engine.meter import agree_on_tally
from distcore.errors import AgreementError, RankError
from distcore.launchers import launch
from distcore.plugin.batching.sampling import rank_sampler, training_plan
from distcore.plugin.strategy.contract import Progress, Run
from distcore.plugin.strategy.hookspecs import hookimpl
from distcore.testing.findings import EXACT, Measured, needs
from distcore.testing.lab import JobLab, Lab
from distcore.testing.problem import Problem
from distcore.testing.rank import lab_of
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.subject import Subject

FAILED = "failed on purpose"
"""Message of the error that the failing rank raises, and name of the file that
it creates just before.
"""
SECONDS = 5.0
"""Most seconds from the failure of a rank to the end of the job."""


@STRATEGIES.law("agreement")
def true_world(lab: Lab) -> Measured:
    """The backend connects all ranks that were started, in their order, and one
    per data shard speaks.
    """
    check_world(lab.job(Problem()).run, lab.hooks, lab.rank_info)
    return Measured(error=0, bound=EXACT, note=f"{lab.world.size} ranks answer")


@STRATEGIES.law("agreement")
def disagreement_is_named(lab: Lab) -> Measured:
    """If a value differs on the last rank, every rank raises an error that names the
    value and that rank.
    """
    last = _last_rank(lab)
    run = lab.job(Problem()).run
    try:
        check_agreed(run, lab.hooks, same="same", fact=lab.world.rank == last)
    except AgreementError as error:
        named = f"disagree on fact: rank {last} " in str(error)
        return Measured(error=not named, bound=EXACT, note=str(error))
    note = "this rank raised no error although the value differs on the last one"
    return Measured(error=1, bound=EXACT, note=note)


@STRATEGIES.law("agreement")
def same_rows_are_noticed(lab: Lab) -> Measured:
    """If all ranks train on the same rows, an error stops them in the first step."""
    _last_rank(lab)
    job = lab.job(Problem())
    plan = training_plan(job.run.config, job.data.train)
    # Every rank takes the rows of shard 0.
    sampler = rank_sampler(plan, 0, lab.world.size)
    micro_batches = MicroBatches(job.data.train, sampler, job.run.config)
    micros = one_step(micro_batches.stream(0, range(1)))
    try:
        check_rows(job.run, lab.hooks, micros, plan.rows(0, 0))
    except AgreementError as error:
        return Measured(error=0, bound=EXACT, note=str(error))
    note = "this rank raised no error although all ranks train on the same rows"
    return Measured(error=1, bound=EXACT, note=note)


@STRATEGIES.law("agreement")
def wishes_are_agreed(lab: Lab) -> Measured:
    """Every rank knows at the next log line a wish that a listener has on the last rank alone."""
    run = lab.job(Problem()).run
    if lab.world.rank == lab.world.size - 1:
        run.tally.add_requests("on_step_end", ["stop", ["save"]])
    requests, _, _ = agree_on_tally(run, lab.hooks)
    wrong = requests ^ {"stop", "save"}
    return Measured(error=len(wrong), bound=EXACT, note=f"known here: {sorted(requests)}")


@STRATEGIES.job_law("agreement")
def failing_rank_ends_job(lab: JobLab) -> Measured:
    """If the last rank raises in its second step, the job soon ends with an error
    that names that rank.

    The error is the seconds from there to the end of the job.
    """
    size = int(lab.subject.config.nproc)
    needs(size > 1, "with one rank there are no other ranks to end")
    # A job that hangs must fail this case, and not hold up the others.
    timeout = 12 * SECONDS
    with tempfile.TemporaryDirectory(prefix="distcore-check-") as temporary:
        folder = Path(temporary)
        try:
            launch(_train_until_failure, lab.subject, folder, nproc=size, timeout=timeout)
        except RankError as error:
            seconds = float("inf")
            file_of_failure = folder / FAILED
            line_due = f"rank {size - 1} of {size} failed: ValueError: {FAILED}"
            if file_of_failure.exists() and line_due in str(error):
                seconds = time.time() - file_of_failure.stat().st_mtime
            return Measured(error=seconds, bound=SECONDS, note=f"in seconds; {error}")
    return Measured(error=float("inf"), bound=SECONDS, note="the job ended without an error")


def _train_until_failure(subject: Subject, folder: Path) -> None:
    """Train on one rank of the job; the last rank raises after its second step."""
    with lab_of(subject, folder, {"failing": _Failing(folder)}) as lab:
        lab.job(Problem()).train(10)


class _Failing:
    """An extension that raises on the last rank after the second step, and leaves a file with
    the time of that.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress) -> None:
        if progress.step == 2 and run.world.rank == run.world.size - 1:
            (self._folder / FAILED).touch()
            raise ValueError(FAILED)


def _last_rank(lab: Lab) -> int:
    """Return the number of the last rank; skip the case if it is the only one."""
    needs(lab.world.size > 1, "with one rank there is nothing to compare")
    return lab.world.size - 1

"""Law 8: what ranks must agree on they agree on, or the run ends with one line that names the rank."""

from __future__ import annotations

from distcore.agreement import check_agreed, check_rows, check_world
from distcore.errors import AgreementError
from distcore.loader import MicroBatches, one_step
from distcore.sampling import rank_sampler, training_plan
from distcore.testing.cases import EXACT, Measured, Skip, law
from distcore.testing.lab import Lab
from distcore.testing.problem import Problem


@law("agreement")
def true_world(lab: Lab) -> Measured:
    """The backend's world is the one that was started, and every rank answers in its place."""
    check_world(lab.job(Problem()).run, lab.hooks, lab.place)
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


def _last_rank(lab: Lab) -> int:
    if lab.world.size == 1:
        raise Skip("one rank agrees with itself")
    return lab.world.size - 1

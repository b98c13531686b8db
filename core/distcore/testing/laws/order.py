"""Law 1: the rows of a step depend on the seed, the epoch and the step alone."""

from __future__ import annotations

from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.strategy.contract import MicroBatch
from distcore.testing.findings import EXACT, Measured
from distcore.testing.lab import BY_TOKENS, Job, Lab
from distcore.testing.problem import Problem
from distcore.testing.strategy_suite import STRATEGIES

PROBLEM = Problem(rows=50)
EPOCHS = 2


@STRATEGIES.law("order")
def rows_of_a_step(lab: Lab) -> Measured:
    """All ranks together get each row that is planned for a step once, for every micro-batch
    size, and by tokens.
    """
    rows_of_rank = lab.global_batch // lab.world.size
    sizes = [size for size in range(1, rows_of_rank + 1) if rows_of_rank % size == 0]
    jobs = [lab.job(PROBLEM, micro_batch_size=size) for size in sizes]
    jobs.append(lab.job(PROBLEM, **BY_TOKENS))
    return _count_misassigned(lab, jobs)


@STRATEGIES.law("order")
def rows_from_loader_workers(lab: Lab) -> Measured:
    """All ranks together get the same rows from loaders with worker processes."""
    job = lab.job(PROBLEM, loader={"workers": 2})
    # One step is enough: each one starts workers of its own.
    return _count_misassigned(lab, [job], epochs=1, steps=1)


@STRATEGIES.law("order")
def rows_by_length(lab: Lab) -> Measured:
    """With rows grouped by length, all ranks together still get each planned row once."""
    job = lab.job(PROBLEM, loader={"length_grouping": "window", "window": 2})
    return _count_misassigned(lab, [job])


@STRATEGIES.law("order")
def micro_batches_agree(lab: Lab) -> Measured:
    """Every rank runs the same number of micro-batches in a step, and only the last one
    is marked as last.
    """
    problem = Problem(rows=2 * lab.global_batch + 1)
    jobs = [lab.job(problem, micro_batch_size=1), lab.job(problem, **BY_TOKENS)]
    steps = [job.rows(0, step) for job in jobs for step in range(3)]
    counts = [len(micros) for micros in steps]
    wrongly_marked = 0
    for micros in steps:
        marks = [micro.last for micro in micros]
        due = [False] * (len(micros) - 1) + [True]
        wrongly_marked += marks != due
    differing = sum(other != counts for other in lab.share(counts))
    note = f"micro-batches of three steps, twice: {counts}"
    return Measured(error=wrongly_marked + differing, bound=EXACT, note=note)


def _count_misassigned(
    lab: Lab, jobs: list[Job], epochs: int = EPOCHS, steps: int | None = None
) -> Measured:
    """Count the rows that are not read once, by one data shard, in the step that they are planned
    for; ``steps`` of each epoch, by default all.
    """
    wrong = 0
    assigned = 0
    for job in jobs:
        plan = training_plan(job.run.config, job.data.train)
        for epoch in range(epochs):
            for step in range(steps or plan.steps):
                # Other ranks of a data shard read the leader's rows again.
                mine = _rows(job.rows(epoch, step)) if lab.world.is_shard_leader else []
                seen = [row for rows in lab.share(mine) for row in rows]
                planned = plan.rows(epoch, step).tolist()
                wrong += len({*seen} ^ {*planned})
                wrong += len(seen) - len({*seen})
                assigned += len(seen)
    note = f"{wrong} of {assigned} rows given twice, not at all or elsewhere"
    return Measured(error=wrong, bound=EXACT, note=note)


def _rows(micros: list[MicroBatch]) -> list[int]:
    """Return the rows of micro-batches, without those that only pad a step."""
    return [row for micro in micros if not micro.is_padding for row in micro.indices.tolist()]

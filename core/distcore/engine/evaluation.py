"""Evaluation: every row exactly once, back in the order of the dataset (law 4)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from distcore.distributed.agreement import agree_on_metrics, share_buffers
from distcore.distributed.devices import UNPINNED
from distcore.engine.collation import check_collation
from distcore.engine.loader import MicroBatches, on_device
from distcore.engine.mode import set_mode
from distcore.engine.precision import autocast_for
from distcore.engine.prefetch import Prefetcher
from distcore.errors import AgreementError, TaskError
from distcore.model.averages import use_average
from distcore.plugin.batching.sampling import evaluation_plan
from distcore.plugin.strategy.contract import Evaluation, MicroBatch, Run, Sampler
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.outputs import Collected, Collector, InOrder, gather
from distcore.plugin.task.ragged import Ragged
from distcore.plugin.task.task import Dataset, Datasets, Task
from distcore.plugin.task.task_evaluation import Evaluate
from distcore.resolve.resolve import best_metric
from distcore.rounding import ceil_div

log = logging.getLogger("distcore")

GATHERED = 2**18
"""About as many rows are gathered together."""
GATHERED_IF_EXACT = 2**12
"""The same under ``exact``, where sums of each block are gathered, not those of a rank."""
EVALUATED = (
    "metrics would follow from ranks and loader processes; evaluate the same values each time"
)
"""The consequence of random evaluation rows, with a remedy."""
SANITY_ROWS = 8
"""Largest number of rows in a sanity check on a device that computes in main memory."""


def evaluate(run: Run, hooks: Hooks, task: Task, dataset: Dataset, data: Datasets) -> Evaluation:
    """Run the task's evaluation over ``dataset`` on all ranks, with averaged weights, if any.

    Returns the same result on every rank. The task's report may need ``data``, the run's datasets.
    Raises AgreementError if a row comes back twice or not at all, which is a fault of the strategy,
    or if ranks compute different metrics; TaskError for invalid outputs.
    """
    share_buffers(run, hooks)
    bound = BoundTask.wrap(task)
    evaluate_batch = bound.evaluation.of_run(run)
    with use_average(run, hooks):
        collected = collect(run, hooks, dataset, evaluate_batch, repeats=run.optimizer is None)
    metrics = bound.evaluation.metrics(collected, dataset, data)
    return Evaluation(
        outputs=collected.outputs,
        metrics=agree_on_metrics(run, hooks, metrics),
        evaluated=len(dataset),  # else ``collect`` had raised
        unique=len(dataset),
        dataset_size=len(dataset),
    )


def evaluate_sets(run: Run, hooks: Hooks, task: BoundTask, data: Datasets) -> Evaluation:
    """Evaluate the evaluation rows.

    Of several sets each metric has the name of its set, and counts are sums.
    """
    if not data.evaluations:
        return evaluate(run, hooks, task, data.evaluation, data)
    sets = {}
    for name, rows in data.evaluations.items():
        sets[name] = evaluate(run, hooks, task, rows, data)
    metrics = {}
    for name, evaluation in sets.items():
        for key, value in evaluation.metrics.items():
            metrics[f"{name}/{key}"] = value
    first, *_ = sets.values()
    return Evaluation(
        outputs=first.outputs,
        metrics=metrics,
        evaluated=sum(evaluation.evaluated for evaluation in sets.values()),
        unique=sum(evaluation.unique for evaluation in sets.values()),
        dataset_size=sum(evaluation.dataset_size for evaluation in sets.values()),
        sets=sets,
    )


def evaluate_all(
    run: Run, hooks: Hooks, task: BoundTask, data: Datasets, last: Evaluation | None = None
) -> Evaluation:
    """Evaluate the test rows, and the evaluation sets if there are several.

    ``last`` has an evaluation of the same weights, which need not be repeated.
    """
    sets: Mapping[str, Evaluation] = {}
    if data.evaluations:
        sets = (last or evaluate_sets(run, hooks, task, data)).sets
    first = next(iter(sets.values()), last)
    if first and data.test is data.evaluation:
        return replace(first, sets=sets)
    return replace(evaluate(run, hooks, task, data.test, data), sets=sets)


def collect(
    run: Run, hooks: Hooks, dataset: Dataset, evaluate_batch: Evaluate, repeats: bool = False
) -> Collected:
    """Evaluate the rows of ``dataset``; return outputs in its order, and sums, on every rank.

    Every rank calls. With ``repeats`` the first rows are read again. Raises AgreementError if a row
    comes back twice or not at all, TaskError if the rows that are read again are others.
    """
    results = InOrder(len(dataset))
    for mine in forward_all(run, hooks, dataset, evaluate_batch, repeats=repeats):
        results.add(gather(run, hooks, mine))
    unique = int(results.seen.count_nonzero())
    if not results.evaluated == unique == len(dataset):
        counts = f"evaluation returned {results.evaluated} rows, {unique} of them different"
        raise AgreementError(f"strategy {hooks.name!r}: {counts}, for a dataset of {len(dataset)}")
    return results.joined()


def sanity_check(run: Run, hooks: Hooks, task: Task, data: Datasets) -> None:
    """Evaluate one micro-batch of each set and discard the result, before the first step.

    The micro-batch is the first, which has the longest rows, so that a lack of memory shows as
    well. On a device that computes in main memory it has at most ``SANITY_ROWS`` rows, so that the
    run starts sooner. These rows stand in for all rows of the evaluation data, so that the task can
    report metrics and predictions. Raises TaskError.
    """
    bound = BoundTask.wrap(task)
    reported: set[str] = set()
    for name, rows in (data.evaluations or {"": data.evaluation}).items():
        collected = Collected()
        if len(rows):
            forward = bound.evaluation.of_run(run)
            [first] = forward_all(run, hooks, rows, forward, sanity=True)
            outputs = {}
            for key, value in first.outputs.items():
                outputs[key] = _repeated(value, len(rows))
            collected = replace(first, outputs=outputs)
        try:
            metrics = bound.evaluation.metrics(collected, rows, data)
        except TaskError as error:
            raise TaskError(f"evaluation set {name!r}: {error}" if name else str(error)) from error
        reported |= {f"{name}/{key}".removeprefix("/") for key in metrics}
        bound.predictions.try_lines(collected.outputs, replace(data, test=rows))
    best = best_metric(run.config, bound, data)
    # It can only be missing where the task declares no metrics.
    if best is not None and best not in reported and run.world.is_main:
        log.warning(
            "the report has no %r, so no best checkpoint is kept; list the report's metrics in"
            " `metrics` of the task",
            best,
        )


def _repeated(value: Tensor | Ragged, rows: int) -> Tensor | Ragged:
    """Return the rows of ``value`` again and again, until they are ``rows``."""
    if isinstance(value, Ragged):
        return value.take(torch.arange(rows) % len(value))
    times = ceil_div(rows, len(value))
    other_dimensions = [1] * (value.dim() - 1)
    return value.repeat(times, *other_dimensions)[:rows]


def first_micro_batch(run: Run, hooks: Hooks, dataset: Dataset) -> MicroBatch:
    """Return this rank's first micro-batch of an evaluation.

    Only its longest rows where the device computes in main memory.
    """
    first = hooks.build_sampler(run, evaluation_plan(run, dataset))(0, 0)[0]
    # The longest rows come last in a micro-batch; "-0" means all of them.
    rows = SANITY_ROWS if run.world.device.type in UNPINNED else 0
    return replace(first, indices=first.indices[-rows:], last=True)


@torch.no_grad()
def forward_all(
    run: Run,
    hooks: Hooks,
    dataset: Dataset,
    evaluate_batch: Evaluate,
    sanity: bool = False,
    repeats: bool = False,
) -> Iterator[Collected]:
    """Yield the task's outputs for this rank's rows, on the CPU, some at a time.

    With ``sanity`` they are those of one micro-batch.

    That micro-batch is read twice, and with ``repeats`` the first step is: rows that are random
    would make a metric follow from the number of ranks and of loader processes.

    Every rank yields as often, and runs the same number of forward passes, as sharded parameters
    need. Padding rows are dropped. Rows of a rank that does not lead its data shard are dropped,
    too, unless ``sanity``. Raises TaskError for outputs of a wrong shape, and for rows that have
    other values when they are read again.
    """
    plan = evaluation_plan(run, dataset)
    sampler: Sampler
    if sanity:
        micros = [first_micro_batch(run, hooks, dataset)]
        sampler, steps = lambda *_: micros, range(1)
    else:
        sampler, steps = hooks.build_sampler(run, plan), range(plan.steps)
    is_exact = run.config.exact is not None
    rows_together = GATHERED_IF_EXACT if is_exact else GATHERED
    steps_together = ceil_div(rows_together, plan.global_batch)
    autocast = autocast_for(run.config, run.capabilities, run.world, evaluates=True)
    set_mode(run, training=False)
    with Prefetcher(run.world.device) as prefetcher:
        micro_batches = MicroBatches(dataset, sampler, run.config)
        prefetcher.follow(micro_batches.stream(epoch=0, steps=steps))
        for step in steps:
            if step % steps_together == 0:
                collector = Collector()
            micros_of_step = prefetcher.take()
            if sanity or (repeats and step == 0):
                check_collation(dataset, micros_of_step, run.config.loader.workers, EVALUATED)
            prefetcher.fetch()
            for micro, batch in micros_of_step:
                with autocast:
                    rows = len(micro.indices)
                    outputs, sums = evaluate_batch(on_device(run, batch, training=False), rows)
                is_counted = sanity or (run.world.is_shard_leader and not micro.is_padding)
                block = step << 32 | micro.block if is_exact else None
                collector.add(micro.indices, outputs, sums, is_counted, block)
            prefetcher.wait()
            if (step + 1) % steps_together == 0 or step + 1 == len(steps):
                yield collector.joined()
    set_mode(run, training=True)

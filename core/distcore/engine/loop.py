"""The training loop, in the order in which a batch passes through it:

sampler → collate → device → accumulate → the task's loss → backward → … last micro-batch … → step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
from torch import Tensor, nn

from distcore.distributed.agreement import check_rows, check_weights
from distcore.distributed.devices import seed
from distcore.engine.collation import check_collation
from distcore.engine.loader import MicroBatches, on_device
from distcore.engine.mode import set_mode
from distcore.engine.own_step import WithLoss, update_of
from distcore.engine.precision import autocast_for
from distcore.engine.prefetch import Prefetcher
from distcore.engine.whole_batch import train_whole_batch
from distcore.engine.written_weights import notice_written_weights
from distcore.errors import TaskError
from distcore.model import averages
from distcore.model.row_dropout import RowMasks, use_row_masks
from distcore.plugin.batching.columns import Column, common_value, read
from distcore.plugin.batching.sampling import BatchPlan, training_plan
from distcore.plugin.strategy.contract import MicroBatch, Progress, Run, StepLoss, StepResult
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.datasets import counts_of
from distcore.plugin.task.losses import Loss, SumOfRows, terms
from distcore.plugin.task.per_epoch import in_epoch
from distcore.plugin.task.task import Batch, Dataset, Task

Term = tuple[float, Column]
"""An additional term of the loss: its scale, and the weight of each row in the mean of the term."""
NO_TERMS: Mapping[str, Term] = {}

StepAhead = tuple[list[tuple[MicroBatch, Batch]], WithLoss, Callable[[StepResult], Progress]]
"""A step to run, with random generators seeded: its micro-batches, a function that scales a loss, and ``finish``.

Call ``finish`` after the optimizer's step: it updates learning rate and averaged weights, calls the listeners' hooks,
and returns the progress.
"""


def steps(
    run: Run, hooks: Hooks, task: Task, dataset: Dataset, progress: Progress
) -> Iterator[tuple[Progress, StepResult, Tensor]]:
    """Train from ``progress`` to ``run.total_steps``; yield progress, result and loss after each optimizer step.

    The loss is a scalar tensor on the device. The sum over one rank of each data shard, divided by
    ``run.loss_multiplier``, is the mean loss over the items of the global batch. Raises AgreementError if a rank trains
    on wrong rows, TaskError if collation is random.
    """
    autocast, bound = autocast_for(run.config, run.capabilities, run.world), BoundTask.of(task)
    step_of = partial(train_whole_batch, hooks, bound, autocast) if bound.whole_batch else partial(train_step, hooks)
    passes, task_loss = hooks.passes_or(step_of), bound.loss_that_logs(run.log)
    update = update_of(run, hooks, bound, passes)
    for micros, with_loss, finish in steps_ahead(run, hooks, bound, dataset, progress):
        if update:
            loss, result = update(micros, with_loss)
        else:
            loss = passes(run, micros, with_loss(task_loss))
            result = hooks.step(run, run.config.clip)
        yield finish(result), result, loss


def steps_ahead(
    run: Run, hooks: Hooks, task: Task, dataset: Dataset, progress: Progress
) -> Generator[StepAhead, None, None]:
    """Yield each step from ``progress`` on. The caller updates weights and calls ``finish`` before the next step."""
    plan = training_plan(run.config, dataset)
    sampler = hooks.build_sampler(run, plan)
    autocast, bound = autocast_for(run.config, run.capabilities, run.world), BoundTask.of(task)
    checked_until = progress.step + run.config.data_guard_steps  # a check costs a gather and a second collation
    set_mode(run, training=True)
    with use_row_masks(run) as masks, Prefetcher(run.world.device) as prefetcher:

        def finish(result: StepResult) -> Progress:
            nonlocal progress
            if masks:
                masks.rows = None
            if progress.step < checked_until:
                check_weights(run, hooks, progress.step + 1)
            if run.scheduler is not None and not result.skipped:
                run.scheduler.step()
            progress = advance(progress, rows, plan, result.skipped)
            if run.ema is not None and not result.skipped:
                averages.update(run, hooks, progress.step)
            run.tally.muted = False  # it is after padding, which says nothing about what a listener logs
            is_guarded = hooks.has_step_listener and progress.step <= checked_until
            with notice_written_weights(run, hooks) if is_guarded else nullcontext():
                hooks.on_step_end(run, progress, result)
            if progress.step_in_epoch == 0:
                hooks.on_epoch_end(run, progress)
            prefetcher.wait()
            return progress

        while progress.step < run.total_steps:
            if progress.step_in_epoch == 0:
                hooks.on_epoch_start(run, progress)
            varied = in_epoch(dataset, progress.epoch)  # a dataset may vary its rows by epoch
            counts = {name: counts_of(varied).get(name, varied.items) for name in bound.logs}
            per_row = common_value(varied.items)  # if all rows have the same number of items, no step reads the column
            left = run.total_steps - progress.step
            coming = range(plan.steps)[progress.step_in_epoch :][:left]
            prefetcher.follow(MicroBatches(varied, sampler, run.config).stream(progress.epoch, coming))
            for step in coming:
                rows = plan.size(step)
                micros = prefetcher.take()
                if progress.step < checked_until:
                    check_rows(run, hooks, micros, plan.rows(progress.epoch, step))
                    check_collation(varied, micros, run.config.loader.workers)
                prefetcher.fetch()
                seed_step(run, progress.step, masks)
                # The only division of the loss: by the items of the whole global batch, which every rank can count.
                items = rows * per_row if per_row else int(read(varied.items, plan.rows(progress.epoch, step)).sum())
                run.tally.items = items
                scale = run.loss_multiplier / items if items else 0.0  # without items the step has no gradient
                others = other_terms(run, counts, plan.rows(progress.epoch, step)) if counts else NO_TERMS
                with_loss = partial(scaled_loss, run, scale=scale, autocast=autocast, others=others, masks=masks)
                yield micros, with_loss, finish


def scaled_loss(
    run: Run,
    task_loss: Loss,
    scale: float,
    autocast: AbstractContextManager[object],
    others: Mapping[str, Term] = NO_TERMS,
    masks: RowMasks | None = None,
) -> StepLoss:
    """Return a function that computes a micro-batch's share of the mean loss, times ``run.loss_multiplier``.

    The share of a padding micro-batch is 0. ``others`` has each additional term of the loss by name, ``masks`` the
    dropout masks by row.
    """

    def scaled(model: nn.Module, micro: MicroBatch, batch: Batch) -> Tensor:
        run.tally.muted = micro.is_padding  # values that the task logs for padding do not count
        if isinstance(task_loss, SumOfRows):
            task_loss.rows = len(micro.indices)
        by_row = masks.begin_rows(micro.indices, run.world.device, batch) if masks else nullcontext()
        with by_row, autocast:
            total, further = terms(task_loss(model, on_device(run, batch)))
        total = total * scale
        for name, term in further.items():
            if name not in others:
                raise TaskError(f"task: loss() returned the term {name!r}, which `logs` of the task does not name")
            factor, count = others[name]
            run.log(name, term, int(read(count, micro.indices).sum()))
            total = total + term * factor
        # A padding micro-batch still runs backward, with weight 0, so that this rank joins every collective.
        return total * 0.0 if micro.is_padding else total

    return scaled


def other_terms(run: Run, counts: Mapping[str, Column], rows: np.ndarray) -> dict[str, Term]:
    """Return each additional term of the loss by name. ``rows``: numbers of the rows of the global batch."""
    totals = {name: int(read(count, rows).sum()) for name, count in counts.items()}
    return {name: (run.loss_multiplier / totals[name] if totals[name] else 0.0, counts[name]) for name in counts}


def train_step(hooks: Hooks, run: Run, micros: list[tuple[MicroBatch, Batch]], loss: StepLoss) -> Tensor:
    """Run forward and backward over the micro-batches of one step; return the sum of their scaled losses.

    A strategy may replace this function by its hook ``train_step``.
    """
    total: Tensor | None = None
    for micro, batch in micros:
        with hooks.accumulate(run, micro.last):
            part = hooks.backward(run, loss(run.model, micro, batch))
        total = part if total is None else total + part
    assert total is not None  # a step has at least one micro-batch
    return total


def seed_step(run: Run, step: int, masks: RowMasks | None) -> None:
    """Seed torch's generators from seed, step and data shard, so that a resumed run draws the same dropout masks.

    Ranks of one data shard draw the same masks: they hold parts of one model, or copies that must stay equal.
    """
    # The constants of splitmix64: neighboring seeds, steps and shards give numbers far apart.
    mixed = run.config.seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9
    if masks:
        masks.key = (mixed + 1) & (2**63 - 1)
    seed(run.world.device, (mixed + run.world.shard * 0x94D049BB133111EB) & (2**63 - 1))


def advance(progress: Progress, rows: int, plan: BatchPlan, skipped: bool = False) -> Progress:
    """Return the progress after one more optimizer step, on ``rows`` rows."""
    ended = progress.step_in_epoch + 1 == plan.steps
    return Progress(
        step=progress.step + 1,
        epoch=progress.epoch + ended,
        step_in_epoch=0 if ended else progress.step_in_epoch + 1,
        samples=progress.samples + rows,
        skipped=progress.skipped + skipped,
    )

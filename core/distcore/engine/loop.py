"""The training loop, in the order in which a batch passes through it.

sampler → collate → device → accumulate → the task's loss → backward → … last micro-batch … → step.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor, nn

from distcore.distributed.agreement import check_rows, check_weights
from distcore.engine.collation import check_collation
from distcore.engine.exact import exact_passes
from distcore.engine.loader import MicroBatches, on_device
from distcore.engine.mode import set_mode
from distcore.engine.precision import autocast_for
from distcore.engine.prefetch import Prefetcher
from distcore.engine.progress import advance
from distcore.engine.seeding import seed_step
from distcore.engine.shares import ItemCounts, Shares
from distcore.engine.whole_batch import train_whole_batch
from distcore.engine.written_weights import notice_written_weights
from distcore.errors import TaskError
from distcore.model import averages
from distcore.model.row_dropout import RowMasks, use_row_masks
from distcore.plugin.batching.columns import read
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.strategy.contract import MicroBatch, Progress, Run, StepLoss, StepResult
from distcore.plugin.strategy.hooks import Hooks, Passes
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.losses import Loss, SumOfRows, split_terms
from distcore.plugin.task.per_epoch import in_epoch
from distcore.plugin.task.task import Batch, Dataset, Task


def steps(
    run: Run,
    hooks: Hooks,
    task: Task,
    dataset: Dataset,
    progress: Progress,
    by_caller: bool = False,
) -> Generator[Step, None, None]:
    """Train from ``progress`` to ``run.total_steps``; yield each optimizer step when it is done.

    With ``by_caller`` each step is yielded twice: first when it is ready, for the caller to set its
    ``loss`` and ``result``, and again when it is done. Raises AgreementError if a rank trains on
    wrong rows or weights, TaskError if collation is random.
    """
    bound = BoundTask.wrap(task)
    plan = training_plan(run.config, dataset)
    sampler = hooks.build_sampler(run, plan)
    autocast = autocast_for(run.config, run.capabilities, run.world)
    passes = exact_passes(run, hooks, bound, autocast) or passes_of(hooks, bound, autocast)
    task_loss = bound.losses.that_logs(run.log)
    # A check costs a gather and a second collation.
    checked_until = progress.step + run.config.data_guard_steps
    set_mode(run, training=True)
    with use_row_masks(run) as masks, Prefetcher(run.world.device) as prefetcher:
        while progress.step < run.total_steps:
            if progress.step_in_epoch == 0:
                hooks.on_epoch_start(run, progress)
            rows_of_epoch = in_epoch(dataset, progress.epoch)  # it may vary its rows by epoch
            counts = ItemCounts(rows_of_epoch, bound.logs)
            steps_left = run.total_steps - progress.step
            numbers = range(plan.steps)[progress.step_in_epoch :][:steps_left]
            micro_batches = MicroBatches(rows_of_epoch, sampler, run.config)
            prefetcher.follow(micro_batches.stream(progress.epoch, numbers))
            for number in numbers:
                # Fetch and check
                micros = prefetcher.take()
                is_checked = progress.step < checked_until
                if is_checked:
                    check_rows(run, hooks, micros, plan.rows(progress.epoch, number))
                    check_collation(rows_of_epoch, micros, run.config.loader.workers)
                prefetcher.fetch()  # the next step's, while the device computes this one

                # Seed
                seed_step(run, progress.step, masks)
                rows = plan.size(number)
                shares = counts.shares(run, plan, progress.epoch, number, rows)
                step = Step(run, micros, shares, passes, autocast, masks)

                # Passes and the optimizer's step
                if by_caller:
                    yield step
                else:
                    step.loss = passes(run, micros, step.scaled(task_loss))
                    step.result = hooks.step(run, run.config.clip)
                if masks:
                    masks.rows = None
                if is_checked:
                    check_weights(run, hooks, progress.step + 1)

                # Advance
                is_skipped = step.result.skipped
                if run.scheduler is not None and not is_skipped:
                    run.scheduler.step()
                progress = step.progress = advance(progress, plan, rows, is_skipped)
                if run.ema is not None and not is_skipped:
                    averages.update(run, hooks, progress.step)

                # Tell
                # It is True after padding, which says nothing about what a listener logs.
                run.tally.muted = False
                notices = is_checked and hooks.has_step_listener
                with notice_written_weights(run, hooks) if notices else nullcontext():
                    hooks.on_step_end(run, progress, step.result)
                if progress.step_in_epoch == 0:
                    hooks.on_epoch_end(run, progress)
                prefetcher.wait()
                yield step


class Step:
    """An optimizer step on this rank: its micro-batches, its scaled loss, and what came of it."""

    loss: Tensor
    """This rank's share of the mean loss over the items of the global batch, a scalar.

    It is multiplied by ``run.loss_multiplier``.

    The sum over one rank of each data shard, divided by ``run.loss_multiplier``, is that mean loss.
    """
    result: StepResult
    """What the optimizer's step returned."""
    progress: Progress
    """The progress after the step."""

    def __init__(
        self,
        run: Run,
        micros: list[tuple[MicroBatch, Batch]],
        shares: Shares,
        passes: Passes,
        autocast: AbstractContextManager[object],
        masks: RowMasks | None,
    ) -> None:
        """``masks`` are the dropout masks by row, if the run has them."""
        self.micros = micros
        """This rank's micro-batches, each with its collated rows."""
        self.items = shares.items
        """Items of the global batch."""
        self.passes = passes
        """Runs forward and backward over all micro-batches."""
        self._run = run
        self._shares = shares
        self._autocast = autocast
        self._masks = masks

    def scaled(self, task_loss: Loss) -> StepLoss:
        """Return a function that computes a micro-batch's share of the mean loss.

        It is multiplied by ``run.loss_multiplier``.

        The share of a padding micro-batch is 0.
        """
        run, shares, masks, autocast = self._run, self._shares, self._masks, self._autocast
        device = run.world.device
        no_masks: AbstractContextManager[object] = nullcontext()
        of_rows = task_loss if isinstance(task_loss, SumOfRows) else None

        def scaled(model: nn.Module, micro: MicroBatch, batch: Batch) -> Tensor:
            run.tally.muted = micro.is_padding  # values that the task logs for padding do not count
            rows = micro.indices
            masks_of_rows = masks.begin_rows(rows, device, batch) if masks else no_masks
            with masks_of_rows, autocast:
                batch = on_device(run, batch)
                losses = of_rows(model, batch, len(rows)) if of_rows else task_loss(model, batch)
                total, further = split_terms(losses)
            # The only division of the loss: by the items of the whole global batch, which every
            # rank can count.
            total = total * shares.scale
            for name, term in further.items():
                if name not in shares.terms:
                    raise TaskError(
                        f"task: loss() returned the term {name!r}, which `logs` of the task does"
                        " not name"
                    )
                scale, count = shares.terms[name]
                run.log(name, term, int(read(count, rows).sum()))
                total = total + term * scale
            # A padding micro-batch still runs backward, with weight 0, so that this rank
            # joins every collective.
            return total * 0.0 if micro.is_padding else total

        return scaled


def passes_of(hooks: Hooks, task: BoundTask, autocast: AbstractContextManager[object]) -> Passes:
    """Return the function that runs forward and backward over all micro-batches of a step."""
    if task.losses.whole_batch:
        return hooks.passes_or(partial(train_whole_batch, hooks, task, autocast))
    return hooks.passes_or(partial(train_step, hooks))


def train_step(
    hooks: Hooks, run: Run, micros: list[tuple[MicroBatch, Batch]], loss: StepLoss
) -> Tensor:
    """Run forward and backward over the micro-batches of one step; return their losses' sum.

    A strategy may replace this function by its hook ``train_step``.
    """
    total: Tensor | None = None
    for micro, batch in micros:
        with hooks.accumulate(run, micro.last):
            part = hooks.backward(run, loss(run.model, micro, batch))
        total = part if total is None else total + part
    assert total is not None  # a step has at least one micro-batch
    return total

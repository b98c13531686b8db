"""The loop. A batch goes down this page once and never comes back up:

sampler → collate → device → accumulate → the task's loss → backward → … last micro-batch … → step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from distcore.data.loader import MicroBatches, one_step, to_device
from distcore.distributed.agreement import check_rows
from distcore.engine.precision import autocast_for
from distcore.plugin.contract import MicroBatch, Progress, Run, StepLoss, StepResult
from distcore.plugin.hooks import Hooks
from distcore.plugin.sampling import BatchPlan, training_plan
from distcore.plugin.task import Batch, Dataset, Task


def steps(
    run: Run, hooks: Hooks, task: Task, dataset: Dataset, progress: Progress
) -> Iterator[tuple[Progress, StepResult, Tensor]]:
    """Train from ``progress`` to ``run.total_steps``; after each optimizer step give what was done.

    The tensor is this rank's share of the step's mean loss: the sum over ranks is ``loss_multiplier`` times the mean.
    """
    plan = training_plan(run.config, dataset)
    batches = MicroBatches(dataset, hooks.build_sampler(run, plan), run.config)
    autocast = autocast_for(run.config, run.capabilities, run.world)
    passes = hooks.passes_or(partial(train_step, hooks))
    uniform = bool((dataset.items == 1).all())  # each row counts one: nothing to add up in every step
    guarded = progress.step + run.config.data_guard_steps
    run.model.train()
    while progress.step < run.total_steps:
        stream = batches.stream(progress.epoch, range(progress.step_in_epoch, plan.steps))
        for step in range(progress.step_in_epoch, plan.steps):
            if progress.step == run.total_steps:
                return
            rows = plan.rows(progress.epoch, step)
            micros = one_step(stream)
            if progress.step < guarded:
                check_rows(run, hooks, micros, rows)
            seed_step(run, progress.step)
            # The divisor, once and for all: the items of the whole global batch, which every rank can count.
            items = len(rows) if uniform else int(dataset.items[rows].sum())
            scale = loss_multiplier(run) / items if items else 0.0  # nothing counts: a step without a gradient
            loss = passes(run, micros, scaled_loss(run, task, scale, autocast))
            result = hooks.step(run, run.config.clip)
            if run.scheduler is not None:
                run.scheduler.step()
            progress = advance(progress, len(rows), plan)
            hooks.on_step_end(run, progress, result)
            yield progress, result, loss


def scaled_loss(run: Run, task: Task, scale: float, autocast: AbstractContextManager[object]) -> StepLoss:
    """Return the loss of one micro-batch as a share of its step's mean loss; padding weighs nothing."""

    def scaled(model: nn.Module, micro: MicroBatch, batch: Batch) -> Tensor:
        with autocast:
            total = task.loss(model, to_device(batch, run.world.device))
        return total * (0.0 if micro.is_padding else scale)

    return scaled


def train_step(hooks: Hooks, run: Run, micros: list[tuple[MicroBatch, Batch]], loss: StepLoss) -> Tensor:
    """Forward and backward over the micro-batches of one step; the sum of their scaled losses, on the device.

    What every strategy does that does not answer the operation of this name.
    """
    total: Tensor | None = None
    for micro, batch in micros:
        with hooks.accumulate(run, micro.last):
            part = hooks.backward(run, loss(run.model, micro, batch))
        total = part if total is None else total + part
    assert total is not None  # a step has at least one micro-batch
    return total


def loss_multiplier(run: Run) -> int:
    """What one rank's loss is multiplied by, so that the mean over data shards is the mean over items."""
    return run.world.shards if run.capabilities.gradients == "mean" else 1


def seed_step(run: Run, step: int) -> None:
    """Make dropout a function of seed, step and data shard (micro-batches follow in order), so that a run can resume.

    Ranks of one data shard draw the same masks: they hold parts of one model, or copies that must not drift.
    """
    mixed = run.config.seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + run.world.shard * 0x94D049BB133111EB
    seed = mixed & (2**63 - 1)
    torch.default_generator.manual_seed(seed)
    if run.world.device.type == "cuda":
        torch.cuda.default_generators[run.world.device.index].manual_seed(seed)


def advance(progress: Progress, rows: int, plan: BatchPlan) -> Progress:
    """The progress after one more step of ``rows`` samples."""
    ended = progress.step_in_epoch + 1 == plan.steps
    return Progress(
        step=progress.step + 1,
        epoch=progress.epoch + ended,
        step_in_epoch=0 if ended else progress.step_in_epoch + 1,
        samples=progress.samples + rows,
    )

"""Optimizer steps that replace the loop's: in phases, one loss after the other, or by the task's ``train_step``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from distcore.distributed.dtensors import reshard
from distcore.engine.own_step import OwnStep, take_own_step
from distcore.plugin.strategy.contract import MicroBatch, Run, StepLoss, StepResult
from distcore.plugin.strategy.hooks import Hooks, Passes
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.losses import Loss
from distcore.plugin.task.phases import parameters_by_phase
from distcore.plugin.task.task import Batch

WithLoss = Callable[[Loss], StepLoss]
"""Turns a loss of the task into one that is scaled for a micro-batch."""
Update = Callable[[list[tuple[MicroBatch, Batch]], WithLoss], tuple[Tensor, StepResult]]
"""Updates the weights by the micro-batches of one step; returns this rank's scaled loss, and the optimizer's result."""


def update_of(run: Run, hooks: Hooks, task: BoundTask, passes: Passes) -> Update | None:
    """Return the update that the task defines; ``None`` if it has none. ``passes`` runs all micro-batches once."""
    if task.has("train_step"):
        return lambda micros, with_loss: take_own_step(task, OwnStep(run, hooks, task, micros, with_loss))
    return _in_phases(run, hooks, task, passes) if task.has("phases") else None


def _in_phases(run: Run, hooks: Hooks, task: BoundTask, passes: Passes) -> Update:
    """Return an update that runs and steps one phase after the other.

    All phases share one optimizer, which steps only parameters with a gradient. The gradient norm covers all phases.
    """
    trained = {name for name, parameter in run.module.named_parameters() if parameter.requires_grad}
    names, losses = parameters_by_phase(task.phases, trained), task.losses_of_phases(run.log)

    def idle(phase: str) -> list[nn.Parameter]:
        return [p for name, p in run.module.named_parameters() if name in trained and name not in names[phase]]

    def update(micros: list[tuple[MicroBatch, Batch]], with_loss: WithLoss) -> tuple[Tensor, StepResult]:
        shares, norms = [], []
        for phase, loss in losses.items():
            reshard(run.module)  # an evaluation gathers them, and the optimizer steps the shards
            others = idle(phase)
            for parameter in others:
                parameter.requires_grad_(False)
            try:
                shares.append(passes(run, micros, with_loss(loss)))
            finally:
                for parameter in others:
                    parameter.requires_grad_(True)
            norms.append(hooks.step(run, run.config.clip).grad_norm)
            run.tally.muted = False
            run.log(phase, shares[-1], run.loss_multiplier / run.world.shards)
        known = [norm for norm in norms if norm is not None]
        norm = torch.stack(known).norm() if len(known) == len(norms) else None
        return torch.stack(shares).sum(), StepResult(grad_norm=norm)

    return update

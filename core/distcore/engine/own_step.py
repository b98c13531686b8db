"""Optimizer steps that replace the loop's: the task's own, through a handle that calls the strategy, or in phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from distcore.distributed.devices import seed
from distcore.distributed.dtensors import reshard
from distcore.errors import TaskError
from distcore.plugin.strategy.contract import MicroBatch, Run, StepLoss, StepResult
from distcore.plugin.strategy.gradient_norm import total_norm
from distcore.plugin.strategy.hooks import Hooks, Passes
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.losses import Loss
from distcore.plugin.task.phases import parameters_by_phase
from distcore.plugin.task.task import Batch

WithLoss = Callable[[Loss], StepLoss]
"""Turns a loss of the task into one that is scaled for a micro-batch."""
Update = Callable[[list[tuple[MicroBatch, Batch]], WithLoss], tuple[Tensor, StepResult]]
"""Updates the weights by the micro-batches of one step; returns this rank's scaled loss, and the optimizer's result."""


class OwnStep:
    """One step, as a task's ``train_step`` receives it; implements ``distcore.Step``."""

    def __init__(
        self,
        run: Run,
        hooks: Hooks,
        task: BoundTask,
        micros: Sequence[tuple[MicroBatch, Batch]],
        with_loss: Callable[[Loss], StepLoss],
    ) -> None:
        reshard(run.module)  # after an evaluation they may be gathered, and so not the tensors that the optimizer steps
        self._run, self._hooks, self._micros, self._with_loss = run, hooks, micros, with_loss
        self._task_loss = task.loss_that_logs(run.log)
        self._seed = torch.initial_seed()
        self._last = True
        self.result: StepResult | None = None

    @property
    def micro_batches(self) -> range:
        """Numbers of this rank's micro-batches; every rank has equally many."""
        return range(len(self._micros))

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name: whole, or this rank's shards as DTensors."""
        return {name: value for name, value in self._run.module.named_parameters() if value.requires_grad}

    def forward(self, number: int, loss: Loss | None = None) -> Tensor:
        """Return a micro-batch's share of the mean loss over the global batch."""
        micro, batch = self._micros[number]
        if number == 0:
            seed(self._run.world.device, self._seed)  # each pass draws the same random numbers
        self._last = micro.last
        with self._hooks.accumulate(self._run, self._last):
            return self._with_loss(loss or self._task_loss)(self._run.model, micro, batch)

    def backward(self, share: Tensor) -> Tensor:
        """Add the gradients of the share that ``forward`` returned last; return it detached."""
        with self._hooks.accumulate(self._run, self._last):
            return self._hooks.backward(self._run, share)

    def gradients(self, loss: Loss | None = None) -> Tensor:
        """Set the gradients to those of the mean loss over the global batch; return this rank's share of it."""
        self.zero()
        total = torch.stack([self.backward(self.forward(number, loss)) for number in self.micro_batches]).sum()
        reshard(self._run.module)
        return total

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm of all ``tensors`` together, such as gradients, over all ranks."""
        return total_norm(tensors)

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's state of a parameter, empty before the first ``apply``; checkpoints keep it."""
        assert self._run.optimizer is not None  # a run that trains
        state: dict[str, Tensor] = self._run.optimizer.state[self.parameters[name]]
        return state

    def apply(self) -> None:
        """Clip the gradients, step the optimizer, and clear the gradients."""
        self.result = self._hooks.step(self._run, self._run.config.clip)

    def zero(self) -> None:
        """Clear the gradients."""
        for parameter in self._run.module.parameters():
            parameter.grad = None


def take_own_step(task: BoundTask, step: OwnStep) -> tuple[Tensor, StepResult]:
    """Let the task make one step; return its loss and the optimizer's result. Raises TaskError if one is missing."""
    loss = task.train_step(step)
    if step.result is None:
        raise TaskError(f"task {task.name}: train_step() did not call step.apply()")
    if not isinstance(loss, Tensor) or loss.dim():
        raise TaskError(f"task {task.name}: train_step() returned {type(loss).__name__}; expected the loss, a scalar")
    return loss.detach(), step.result


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
        shares, norms, skipped = [], [], []
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
            result = hooks.step(run, run.config.clip)
            norms.append(result.grad_norm)
            skipped.append(result.skipped)
            run.tally.muted = False
            items = run.tally.items
            run.log(phase, shares[-1] * items, items * run.loss_multiplier / run.world.shards)
        known = [norm for norm in norms if norm is not None]
        norm = total_norm(known) if len(known) == len(norms) else None
        return torch.stack(shares).sum(), StepResult(grad_norm=norm, skipped=all(skipped))

    return update

"""Optimizer steps that replace the loop's: the task's own, by a handle or in phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from distcore.distributed.devices import seed
from distcore.distributed.dtensors import reshard
from distcore.engine.loop import Step
from distcore.errors import TaskError
from distcore.plugin.strategy.contract import Run, StepResult
from distcore.plugin.strategy.exact_norm import exact_squared_norm
from distcore.plugin.strategy.gradient_norm import total_norm
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.losses import Loss
from distcore.plugin.task.phases import parameters_by_phase

Update = Callable[[Step], None]
"""Updates the weights by the micro-batches of one step; sets its loss and result."""


class OwnStep:
    """One step, as a task's ``train_step`` receives it; implements ``distcore.Step``."""

    def __init__(self, run: Run, hooks: Hooks, task: BoundTask, step: Step) -> None:
        # After an evaluation they may be gathered, and so not the tensors that the optimizer steps.
        reshard(run.module)
        self._run = run
        self._hooks = hooks
        self._step = step
        self._task_loss = task.losses.that_logs(run.log)
        self._seed = torch.initial_seed()
        self._last = True
        self.result: StepResult | None = None

    @property
    def micro_batches(self) -> range:
        """Numbers of this rank's micro-batches; every rank has equally many."""
        return range(len(self._step.micros))

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name: whole, or this rank's shards as DTensors."""
        return {
            name: value
            for name, value in self._run.module.named_parameters()
            if value.requires_grad
        }

    def forward(self, number: int, loss: Loss | None = None) -> Tensor:
        """Return a micro-batch's share of the mean loss over the global batch."""
        self._refuse_parts("forward")
        micro, batch = self._step.micros[number]
        if number == 0:
            seed(self._run.world.device, self._seed)  # each pass draws the same random numbers
        self._last = micro.last
        with self._hooks.accumulate(self._run, self._last):
            share_of = self._step.scaled(loss or self._task_loss)
            return share_of(self._run.model, micro, batch)

    def backward(self, share: Tensor) -> Tensor:
        """Add the gradients of the share that ``forward`` returned last; return it detached."""
        self._refuse_parts("backward")
        with self._hooks.accumulate(self._run, self._last):
            return self._hooks.backward(self._run, share)

    def gradients(self, loss: Loss | None = None) -> Tensor:
        """Set the gradients to those of the mean loss over the global batch.

        Returns this rank's share of that loss.
        """
        self.zero()
        if self._run.config.exact is not None:
            seed(self._run.world.device, self._seed)  # each pass draws the same random numbers
            scaled = self._step.scaled(loss or self._task_loss)
            return self._step.passes(self._run, self._step.micros, scaled)
        shares = [self.backward(self.forward(number, loss)) for number in self.micro_batches]
        reshard(self._run.module)
        return torch.stack(shares).sum()

    def _refuse_parts(self, method: str) -> None:
        """Raise TaskError under ``exact`` for a ``method`` of a single micro-batch."""
        exact = self._run.config.exact
        if exact is not None:
            raise TaskError(
                f"exact = {exact}: step.{method}() is of one micro-batch, and a step's gradients"
                " are added up exactly over all; call step.gradients(loss)"
            )

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm of all ``tensors`` together, such as gradients, over all ranks."""
        if self._run.config.exact is not None:
            return exact_squared_norm(list(tensors)).sqrt().float()
        return total_norm(tensors)

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's state of a parameter; checkpoints keep it.

        It is empty before the first ``apply``.
        """
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


def take_own_step(run: Run, hooks: Hooks, task: BoundTask, step: Step) -> None:
    """Let the task make one step. Raises TaskError if it has no loss or does not step."""
    handle = OwnStep(run, hooks, task, step)
    loss = task.train_step(handle)
    if handle.result is None:
        raise TaskError(f"task {task.name}: train_step() did not call step.apply()")
    if not isinstance(loss, Tensor) or loss.dim():
        raise TaskError(
            f"task {task.name}: train_step() returned {type(loss).__name__}; expected the loss, a"
            " scalar"
        )
    step.loss = loss.detach()
    step.result = handle.result


def make_update(run: Run, hooks: Hooks, task: BoundTask) -> Update | None:
    """Return the update that the task defines; ``None`` if it has none."""
    if task.has("train_step"):
        return lambda step: take_own_step(run, hooks, task, step)
    return _in_phases(run, hooks, task) if task.has("phases") else None


def _in_phases(run: Run, hooks: Hooks, task: BoundTask) -> Update:
    """Return an update that runs and steps one phase after the other.

    All phases share one optimizer, which steps only parameters with a gradient. The gradient
    norm covers all phases.
    """
    trained = {name for name, parameter in run.module.named_parameters() if parameter.requires_grad}
    names = parameters_by_phase(task.losses.phases, trained)
    losses = task.losses.of_phases(run.log)

    def idle(phase: str) -> list[nn.Parameter]:
        """Return the trained parameters that are not the phase's."""
        parameters = []
        for name, parameter in run.module.named_parameters():
            if name in trained and name not in names[phase]:
                parameters.append(parameter)
        return parameters

    def update(step: Step) -> None:
        shares: list[Tensor] = []
        results: list[StepResult] = []
        for phase, loss in losses.items():
            reshard(run.module)  # an evaluation gathers them, and the optimizer steps the shards
            others = idle(phase)
            for parameter in others:
                parameter.requires_grad_(False)
            try:
                share = step.passes(run, step.micros, step.scaled(loss))
            finally:
                for parameter in others:
                    parameter.requires_grad_(True)
            shares.append(share)
            results.append(hooks.step(run, run.config.clip))
            run.tally.muted = False
            # Items of the whole step, from one shard: a part from each would be rounded.
            items = step.items * run.loss_multiplier if run.world.shard == 0 else 0.0
            run.log(phase, share * step.items, items)
        norms = [result.grad_norm for result in results if result.grad_norm is not None]
        step.loss = torch.stack(shares).sum()
        step.result = StepResult(
            grad_norm=total_norm(norms) if len(norms) == len(results) else None,
            skipped=all(result.skipped for result in results),
        )

    return update


def updated(loop: Iterator[Step], update: Update) -> Iterator[Step]:
    """Update each step that is ready; yield it when the loop has ended it."""
    for ready in loop:
        update(ready)
        yield next(loop)

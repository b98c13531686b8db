"""Steps that a task makes itself, through a handle that calls the strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distcore.distributed.devices import seed
from distcore.distributed.dtensors import reshard
from distcore.errors import TaskError
from distcore.plugin.strategy.contract import MicroBatch, Run, StepLoss, StepResult
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.losses import Loss
from distcore.plugin.task.task import Batch


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
        norm: Any = nn.utils.get_total_norm(list(tensors))
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]

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

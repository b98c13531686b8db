"""A step of a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from distcore.engine.own_step import OwnStep
from distcore.errors import TaskError
from distcore.plugin.strategy.contract import StepResult
from distcore.plugin.task.losses import Loss


class SessionStep(OwnStep):
    """A step of a session; ``apply`` also ends the step. Implements ``distcore.Step``."""

    meet: Callable[[str], None]
    """Compares the next call with those of the other ranks."""
    ended: Callable[[StepResult, Tensor | None], None]
    """Ends the step, once the optimizer has stepped."""
    share: Tensor | None = None
    """This rank's share of the loss; ``None`` where the user computes gradients in parts."""

    def gradients(self, loss: Loss | None = None) -> Tensor:
        """Set the gradients to those of the mean loss over the global batch; return this rank's
        share of it.
        """
        if self._run.config.exact is not None:  # else ``forward`` does
            self.meet("calls step.gradients()")
        self.share = super().gradients(loss)
        return self.share

    def forward(self, number: int, loss: Loss | None = None) -> Tensor:
        """Return a micro-batch's share of the mean loss over the global batch."""
        if number == 0:
            self.meet("calls step.gradients()")
        return super().forward(number, loss)

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm of all ``tensors`` together, such as gradients, over all ranks."""
        self.meet("calls step.norm()")
        return super().norm(tensors)

    def apply(self) -> None:
        """Clip the gradients, and step the optimizer and the schedule."""
        if self.result is not None:
            raise TaskError("Session: step.apply() was called twice in one step")
        self.meet("calls step.apply()")
        super().apply()
        assert self.result is not None
        self.ended(self.result, self.share)


class OnePass(SessionStep):
    """A step whose gradients the engine holds until ``apply``: the loss is all
    that the user decides.
    """

    def gradients(self, loss: Loss | None = None) -> Tensor:
        """Have the engine compute the gradients; return this rank's share of the
        loss. Once per step.
        """
        if self.share is not None:
            self._refuse()
        self.meet("calls step.gradients()")
        scaled = self._step.scaled(loss or self._task_loss)
        self.share = self._step.passes(self._run, self._step.micros, scaled)
        return self.share

    def apply(self) -> None:
        """Clip the gradients, and step the optimizer and the schedule."""
        if self.share is None:
            self._refuse()
        super().apply()

    def _refuse(self, *_: object, **__: object) -> Any:
        """Raise TaskError, in place of a method of a step that needs its gradients."""
        config = self._run.config
        who = (
            f"strategy {config.strategy!r} with precision = {config.precision!r} keeps the"
            " gradients"
        )
        raise TaskError(
            f"Session: {who}; call step.gradients(loss) once, then step.apply(), and nothing else"
            " of a step"
        )

    _refused: Any = _refuse
    forward = backward = norm = state = zero = _refused
    parameters = property(_refuse)

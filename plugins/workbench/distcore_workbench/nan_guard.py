"""End a run at the first loss or gradient norm that is not finite."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor, isfinite

from distcore import Progress, Run, StepResult, TrainingError, hookimpl


@dataclass
class NanGuard:
    """Raise TrainingError, which names step and rank, instead of training on.

    Each check reads a value from the device and so waits for it.
    """

    # it changes no gradient, so strategies that have none before their step take it
    only_looks = True

    loss: bool = True
    """Check the loss of every step, before the optimizer uses its gradient."""

    gradients: bool = True
    """Check the gradient norm of every step. Not under fp16, where the loss scaler skips
    such steps by itself.
    """

    def __post_init__(self) -> None:
        self._done: int | None = None

    @hookimpl(wrapper=True)
    def train_step(self, run: Run) -> Generator[None, Tensor, Tensor]:
        """Check the loss of a step; raises TrainingError."""
        loss = yield
        if self.loss and not isfinite(loss):
            raise self._error(run, "the loss", loss)
        return loss

    @hookimpl(wrapper=True)
    def step(self, run: Run) -> Generator[None, StepResult, StepResult]:
        """Check the gradient norm of a step; raises TrainingError."""
        result = yield
        norm = result.grad_norm
        if (
            self.gradients
            and norm is not None
            and run.config.precision != "fp16"
            and not isfinite(norm)
        ):
            raise self._error(run, "the gradient norm", norm)
        return result

    @hookimpl
    def on_step_end(self, progress: Progress) -> None:
        """Remember the step, for the message."""
        self._done = progress.step

    def _error(self, run: Run, what: str, value: Tensor) -> TrainingError:
        where = "the first step of this run" if self._done is None else f"step {self._done + 1}"
        return TrainingError(
            f"nan_guard: {what} is {value.item()} in {where} on rank {run.world.rank}; "
            "try a lower --lr, a warm-up, or --precision fp32"
        )

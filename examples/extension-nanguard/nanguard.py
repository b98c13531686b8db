"""A guard: the run ends at a loss or gradient norm that is not finite."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor, isfinite

from distcore import DistcoreError, Run, StepResult, hookimpl


class NanGuard:
    """Raise DistcoreError at the first loss or gradient norm that is not finite."""

    only_looks = True  # it changes no gradient

    @hookimpl(wrapper=True)
    def backward(self, loss: Tensor) -> Generator[None, Tensor, Tensor]:
        """Check the loss before its backward pass."""
        if not isfinite(loss):
            raise DistcoreError(f"the loss is {loss.item()}: try a lower --lr")
        return (yield)

    @hookimpl(wrapper=True)
    def step(self, run: Run) -> Generator[None, StepResult, StepResult]:
        """Check the gradient norm after the step; under fp16 the loss scaler
        skips such steps itself.
        """
        result = yield
        if (
            result.grad_norm is not None
            and run.config.precision != "fp16"
            and not isfinite(result.grad_norm)
        ):
            raise DistcoreError(f"the gradient norm is {result.grad_norm.item()}: try a lower --lr")
        return result

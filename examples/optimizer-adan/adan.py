"""Adan: Adaptive Nesterov Momentum Algorithm (Xie et al., 2022,
https://arxiv.org/abs/2208.06677).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from distcore import ParameterGroup

Rate = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class Adan:
    """Adam with the momentum of Nesterov, which it estimates by
    differences of successive gradients.

    The authors advise a rate 5 to 10 times that of Adam. The state has four tensors per
    parameter, Adam's has two.
    """

    elementwise: ClassVar = True

    weight_decay: Annotated[float, Field(ge=0)] = 0.02
    """Decay of the weights, per unit of learning rate, by a proximal step."""
    betas: tuple[Rate, Rate, Rate] = (0.98, 0.92, 0.99)
    """What a step keeps of the means of gradients, of their differences, and of squares: 1 -
    beta of the paper.
    """
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the mean square."""

    def build(self, module: nn.Module, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return Nesterov([{"betas": self.betas, "eps": self.eps, **group} for group in groups])


class Nesterov(torch.optim.Optimizer):
    """Algorithm 1 of the paper, without restarts; as in the authors' code, means are corrected for
    the start at 0.
    """

    def __init__(self, params: list[ParameterGroup]) -> None:
        """Take groups that have all their settings."""
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the parameters that have a gradient."""
        loss = closure and torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, betas = self.state[parameter], group["betas"]
        if not state:
            names = ("exp_avg", "exp_avg_diff", "exp_avg_sq")
            state |= {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
            state |= {"step": torch.zeros(()), "before": gradient.clone()}
        state["step"] += 1
        difference = gradient - state["before"]
        state["before"].copy_(gradient)
        state["exp_avg"].lerp_(gradient, 1 - betas[0])
        state["exp_avg_diff"].lerp_(difference, 1 - betas[1])
        state["exp_avg_sq"].lerp_((gradient + betas[1] * difference).square(), 1 - betas[2])
        mean, slope, square = (1 - beta ** float(state["step"]) for beta in betas)
        size = (state["exp_avg_sq"] / square).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], size, value=-group["lr"] / mean)
        parameter.addcdiv_(state["exp_avg_diff"], size, value=-group["lr"] * betas[1] / slope)
        parameter.div_(1 + group["lr"] * group["weight_decay"])

"""``lion``: Lion, of Symbolic Discovery of Optimization Algorithms.

Chen et al., 2023, https://arxiv.org/abs/2302.06675.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from distcore import ParameterGroup

DecayRate = Annotated[float, Field(ge=0, lt=1)]
"""Part of a running mean that a step keeps."""


@dataclass(frozen=True, kw_only=True)
class Lion:
    """Lion: a step is the learning rate, against the sign of a running mean of gradients.

    Weight decay is decoupled from the gradient. The paper uses a learning rate 3 to 10 times
    smaller than AdamW's, and a weight decay larger by the same factor.
    """

    elementwise: ClassVar = True

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Fraction of a weight that each step subtracts, per unit of learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.99)
    """Decay rates of the running mean: for the direction of a step, and for the mean
    that later steps use.
    """

    def build(self, module: nn.Module, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return SignDescent(groups, betas=self.betas)


class SignDescent(torch.optim.Optimizer):
    """Algorithm 2 of the paper, on plain tensors and on DTensors.

    Each group has ``lr`` and ``weight_decay``, some have ``betas``. The state of a parameter is
    ``exp_avg``, of its shape and dtype.
    """

    def __init__(self, params: list[ParameterGroup], betas: tuple[float, float]) -> None:
        """Take groups that have their rates; ``betas`` are those of a group without its own."""
        super().__init__(params, {"betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the parameters that have a gradient; like torch, call ``closure`` first."""
        loss = closure and torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta_of_direction, beta_of_mean = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                state = self.state[parameter]
                if gradient is None:
                    continue
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                mean = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = mean.lerp(gradient, 1 - beta_of_direction).sign_()
                parameter.add_(direction, alpha=-group["lr"])
                mean.lerp_(gradient, 1 - beta_of_mean)
        return loss

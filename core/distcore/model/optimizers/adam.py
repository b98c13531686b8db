"""``adamw`` and ``adam``: torch's, fused where the device has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn

from distcore.distributed.devices import FUSED
from distcore.plugin.optimizer import ParameterGroup


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Options of both: the decay of the running means of the gradient and of its square."""

    elementwise: ClassVar = True

    # Without an alias: the page of options shows this text.
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of the step, against division by zero."""
    of_torch: ClassVar[Callable[..., torch.optim.Optimizer]]

    def build(self, module: nn.Module, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
        """Return torch's optimizer."""
        fused = can_fuse(module)
        return type(self).of_torch(groups, betas=self.betas, eps=self.eps, fused=fused)


@dataclass(frozen=True, kw_only=True)
class AdamW(Moments):
    """torch's AdamW, fused if possible.

    Weight decay is decoupled from the gradient: lr times weight_decay per step.
    """

    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Fraction of a weight that each step subtracts, per unit of learning rate."""

    of_torch = torch.optim.AdamW


@dataclass(frozen=True, kw_only=True)
class Adam(Moments):
    """torch's Adam, fused if possible.

    Weight decay is added to the gradient, so that the step scales it, too.
    """

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty: the weight times this is added to the gradient."""

    of_torch = torch.optim.Adam


def can_fuse(module: nn.Module) -> bool:
    """Return True if torch's fused Adam takes the parameters.

    They must be on one type of device, and floating-point if trained.
    """
    kinds = set()
    for parameter in module.parameters():
        is_possible = parameter.is_floating_point() or not parameter.requires_grad
        kinds.add((parameter.device.type, is_possible))
    return len(kinds) == 1 and kinds <= {(kind, True) for kind in FUSED}

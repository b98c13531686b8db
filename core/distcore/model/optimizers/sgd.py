"""``sgd``: torch's stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn

from distcore.plugin.optimizer import ParameterGroup


@dataclass(frozen=True, kw_only=True)
class SGD:
    """torch's SGD, which keeps no state without momentum. Weight decay is added to the gradient."""

    elementwise: ClassVar = True

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty: the weight times this is added to the gradient."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the last step's direction that is kept; 0: none, and no memory for it."""
    nesterov: bool = False
    """Look ahead along the momentum; needs momentum above 0."""

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum above 0")

    def build(self, module: nn.Module, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
        """Return torch's SGD."""
        return torch.optim.SGD(groups, momentum=self.momentum, nesterov=self.nesterov)

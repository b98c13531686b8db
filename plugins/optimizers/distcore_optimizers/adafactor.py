"""``adafactor``: torch's Adafactor, whose second moments of a matrix are a row and a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn

from distcore import ParameterGroup


@dataclass(frozen=True, kw_only=True)
class Adafactor:
    """torch's Adafactor, which keeps one row and one column of each matrix instead of two moments.

    Steps are relative to the size of the weights, so it needs larger learning rates than AdamW.
    """

    elementwise: ClassVar = False

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Fraction of a weight that each step subtracts, per unit of learning rate."""
    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    """Exponent: at step t the running mean of squares moves to the new squares at the rate
    t to this power.
    """
    eps: tuple[float | None, float] = (None, 1e-3)
    """Lower bounds: of the root of a mean of squares (null: the dtype's own), and of
    the size of weights.
    """
    d: Annotated[float, Field(ge=1)] = 1.0
    """Root mean square of an update above which it is scaled down."""

    def build(self, module: nn.Module, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
        """Return torch's Adafactor."""
        return torch.optim.Adafactor(groups, beta2_decay=self.beta2_decay, eps=self.eps, d=self.d)

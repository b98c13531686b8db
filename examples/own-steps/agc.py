"""Adaptive gradient clipping (Brock et al. 2021): each unit's gradient is bounded by the
size of its weights.
"""

from dataclasses import dataclass

import torch
from digits import Digits


@dataclass(frozen=True)
class AGC(Digits):
    """Clips row by row."""

    bound: float = 0.01
    """Largest norm of a unit's gradient, relative to the norm of its weights."""

    @torch.no_grad()
    def train_step(self, step):
        with torch.enable_grad():
            loss = step.gradients()
        for parameter in step.parameters.values():
            if parameter.dim() > 1:  # as in the paper, not biases
                axes = list(range(1, parameter.dim()))
                size = parameter.square().sum(axes, keepdim=True).sqrt().clamp(min=1e-3)
                norm = parameter.grad.square().sum(axes, keepdim=True).sqrt().clamp(min=1e-6)
                parameter.grad *= (self.bound * size / norm).clamp(max=1)
        step.apply()
        return loss

"""Sharpness-aware minimization (Foret et al. 2021): step with the gradient at
the worst weights nearby.
"""

from dataclasses import dataclass

import torch
from digits import Digits


@dataclass(frozen=True)
class SAM(Digits):
    """Seeks flat minima."""

    rho: float = 0.05
    """Distance of the worst weights."""

    @torch.no_grad()
    def train_step(self, step):
        with torch.enable_grad():
            loss = step.gradients()
        parameters = list(step.parameters.values())
        scale = self.rho / (step.norm([p.grad for p in parameters]) + 1e-12)
        moves = [p.grad * scale for p in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter += move
        with torch.enable_grad():
            step.gradients()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter -= move
        step.apply()
        return loss

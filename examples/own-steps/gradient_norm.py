"""A penalty on the norm of the gradient (Zhao, Zhang and Hu 2022), by a second gradient nearby."""

from dataclasses import dataclass

import torch
from digits import Digits


@dataclass(frozen=True)
class GradientNorm(Digits):
    """Mixes the gradient of the weights with the gradient at weights uphill of them."""

    radius: float = 0.05
    """Distance of the weights uphill."""
    alpha: float = 0.7
    """Fraction of the gradient uphill in the mix: the penalty divided by the radius."""

    def train_step(self, step):
        loss = step.gradients()
        here = {name: p.grad.clone() for name, p in step.parameters.items()}
        scale = self.radius / (step.norm(list(here.values())) + 1e-12)
        with torch.no_grad():
            for name, parameter in step.parameters.items():
                parameter += here[name] * scale
        step.gradients()
        with torch.no_grad():
            for name, parameter in step.parameters.items():
                parameter -= here[name] * scale
                parameter.grad = (1 - self.alpha) * here[name] + self.alpha * parameter.grad
        step.apply()
        return loss

"""Lookahead (Zhang et al. 2019): every few steps slow weights move toward the fast ones,
which continue from there.
"""

from dataclasses import dataclass

import torch
from digits import Digits


@dataclass(frozen=True)
class Lookahead(Digits):
    """k steps forward, one step back."""

    every: int = 5
    """Steps of the fast weights."""
    alpha: float = 0.5
    """How far the slow weights move."""

    @torch.no_grad()
    def train_step(self, step):
        slow = {n: step.state(n).get("slow", p.clone()) for n, p in step.parameters.items()}
        with torch.enable_grad():
            loss = step.gradients()
        step.apply()
        for name, parameter in step.parameters.items():
            state = step.state(name)
            state["slow"] = slow[name]
            if int(state["step"]) % self.every == 0:
                state["slow"].lerp_(parameter, self.alpha)
                parameter.copy_(state["slow"])
        return loss

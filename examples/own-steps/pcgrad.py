"""Gradient surgery, PCGrad (Yu et al. 2020): two conflicting gradients each lose the part
that opposes the other.
"""

from dataclasses import dataclass

import torch
from digits import Digits
from torch.nn.functional import binary_cross_entropy_with_logits


@dataclass(frozen=True)
class PCGrad(Digits):
    """Learns digits and whether they are odd, without conflict between the two losses."""

    def is_odd(self, model, batch):
        logits = model(batch[0])
        odd = logits[:, 1::2].logsumexp(1) - logits[:, ::2].logsumexp(1)
        return binary_cross_entropy_with_logits(odd, (batch[1] % 2).float(), reduction="sum")

    def train_step(self, step):
        losses, gradients = [], []
        for loss in (None, self.is_odd):
            losses.append(step.gradients(loss))
            gradients.append([p.grad.clone() for p in step.parameters.values()])
        one, other = gradients
        # The inner product from norms, which the handle takes over all ranks.
        squares = [
            step.norm(each) ** 2
            for each in (one, other, [a + b for a, b in zip(one, other, strict=True)])
        ]
        product = ((squares[2] - squares[0] - squares[1]) / 2).clamp(max=0)
        for parameter, a, b in zip(step.parameters.values(), one, other, strict=True):
            parameter.grad = a - product / squares[1] * b + b - product / squares[0] * a
        step.apply()
        return torch.stack(losses).sum()

"""First-order MAML (Finn et al. 2017): the gradient of query rows at weights
adapted to support rows.
"""

from dataclasses import dataclass

import torch
from digits import Digits


@dataclass(frozen=True)
class FOMAML(Digits):
    """Each global batch is one task of meta-learning: half its rows are support rows,
    half are query rows.
    """

    inner_lr: float = 0.1
    """Rate of the inner steps."""
    inner_steps: int = 2
    """Inner steps of plain gradient descent."""

    def support(self, model, batch):
        return 2 * (self.row_loss(model, batch) * batch[2]).sum()

    def query(self, model, batch):
        return 2 * (self.row_loss(model, batch) * ~batch[2]).sum()

    def train_step(self, step):
        parameters = list(step.parameters.values())
        before = [p.detach().clone() for p in parameters]
        for _ in range(self.inner_steps):
            step.gradients(self.support)
            with torch.no_grad():
                for parameter in parameters:
                    parameter -= self.inner_lr * parameter.grad
        loss = step.gradients(self.query)
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        step.apply()
        return loss

"""The task of the suites: a small network that tells on which side of a line a point is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from distcore import Simple


@dataclass(frozen=True, kw_only=True)
class Points(Simple):
    """Tells on which side of a line a point is, with dropout: a random number that is drawn
    too much is seen.
    """

    metrics: ClassVar = {"loss": "min", "accuracy": "max"}
    lr: ClassVar = 1e-2

    fails: bool = False
    """Raise an error in the middle of the run."""

    def data(self) -> list[TensorDataset]:
        """Return the rows to train on, and those to evaluate on."""
        points = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        sides = (points.sum(1) > 0).long()
        return [TensorDataset(points[:32], sides[:32]), TensorDataset(points[32:], sides[32:])]

    def model(self) -> nn.Module:
        """Return the network."""
        return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def row_loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return the loss of each row; raises ValueError if the run is to fail."""
        points, sides = batch
        if self.fails and model.training:
            raise ValueError("this run is to fail")
        return cross_entropy(model(points), sides, reduction="none")

    def row_metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        """Return whether each row is right."""
        points, sides = batch
        return {"accuracy": (model(points).argmax(-1) == sides).float()}

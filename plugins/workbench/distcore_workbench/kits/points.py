"""The task of the suites: a small network that classifies points by the side of a line."""

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
    """Classifies points by the side of a line on which they are.

    The network has dropout, so one random number drawn too many changes the losses.
    """

    metrics: ClassVar = {"loss": "min", "accuracy": "max"}
    lr: ClassVar = 1e-2

    fails: bool = False
    """Raise an error in the middle of the run."""

    def data(self) -> list[TensorDataset]:
        """Return the rows to train on, and those to evaluate on."""
        generator = torch.Generator().manual_seed(0)
        points = torch.randn(40, 2, generator=generator)
        sides = (points.sum(1) > 0).long()
        train = TensorDataset(points[:32], sides[:32])
        evaluation = TensorDataset(points[32:], sides[32:])
        return [train, evaluation]

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
        predicted_sides = model(points).argmax(-1)
        return {"accuracy": (predicted_sides == sides).float()}

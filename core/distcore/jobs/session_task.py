"""What a loop of the user's own trains, evaluates and remembers, as the engine needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from distcore.config import RunConfig
from distcore.errors import TaskError
from distcore.plugin.task.simple import Simple, given_rows
from distcore.plugin.task.task import Batch, Dataset, Datasets, Direction, Losses

Outputs = Callable[[nn.Module, Batch], Tensor | dict[str, Tensor]]
"""Returns a value for each row of a batch, shape ``(n,)``: one tensor, or several by name."""


class SessionTask(Simple):
    """The task of a session: its rows and its model. The loss comes with each step."""

    metrics: ClassVar[Mapping[str, Direction]] = {}

    def __init__(
        self,
        build: Callable[[], nn.Module],
        rows: Any,
        collate: Callable[[list[Any]], Batch] | None,
    ) -> None:
        self._build, self._rows, self._collate = build, rows, collate

    def collate(self, rows: list[Any]) -> Batch:
        """Return rows as a batch, by the user's function if there is one."""
        return self._collate(rows) if self._collate else super().collate(rows)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the rows as a ``distcore.Dataset``."""
        rows = self._rows
        if not hasattr(type(rows), "batch"):
            rows = given_rows(rows, self)
        return Datasets(train=rows, evaluation=rows, test=rows)

    def model(self) -> nn.Module:
        """Return the model."""
        return self._build()

    def row_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Refuse a step without a loss."""
        raise TaskError(
            "Session: step.gradients() needs your loss: a function of model and batch that returns"
            " a sum"
        )


class Judged(Simple):
    """Rows that a loop of the user's own evaluates, and its outputs of each."""

    metrics: ClassVar[Mapping[str, Direction]] = {}

    def __init__(
        self, outputs: Outputs, rows: Any, collate: Callable[[list[Any]], Batch] | None
    ) -> None:
        self._outputs, self._rows, self._collate = outputs, rows, collate

    def collate(self, rows: list[Any]) -> Batch:
        """Return rows as a batch, by the user's function if there is one."""
        return self._collate(rows) if self._collate else super().collate(rows)

    def dataset(self) -> Dataset:
        """Return the rows as a ``distcore.Dataset``."""
        rows: Dataset = self._rows
        if not hasattr(type(rows), "batch"):
            rows = given_rows(rows, self)
        return rows

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the user's values of each row by name; those without a name are the loss."""
        values = self._outputs(model, batch)
        return {"loss": values} if isinstance(values, Tensor) else values

    def report(self, outputs: Mapping[str, Tensor], data: Datasets) -> dict[str, object]:
        """Return the mean of each value over the rows."""
        return {name: values.double().mean().item() for name, values in outputs.items()}


class LoopState:
    """What a loop keeps beside the model: JSON values by name, which checkpoints have.

    The checkpoint's states have it under ``session``.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """Return the values."""
        return self.values

    def load_state(self, saved: dict[str, Any]) -> None:
        """Take over the values of a checkpoint, in the dict that the loop has."""
        self.values.clear()
        self.values.update(saved)

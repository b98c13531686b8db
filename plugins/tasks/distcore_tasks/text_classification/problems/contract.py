"""The protocol that each kind of labels implements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from distcore import Direction
from distcore_tasks.shared.classification.labels import Labeled

if TYPE_CHECKING:
    from torch import Tensor

Origins = Iterable[Mapping[str, object]]
"""Where each row came from."""


class Problem(Protocol):
    """From the labels of a data file to a loss and a report. It has no state."""

    metrics: ClassVar[dict[str, Direction]]
    """What every report has, with what is better."""

    def from_csv(self, labels: list[Any]) -> list[Any]:
        """Return the labels of a CSV file, all of them strings, as what they say; one that says nothing as it is."""
        ...

    def label_problems(self, labels: Sequence[object]) -> Iterator[str | None]:
        """Yield what is wrong with each label, ``None`` if nothing is."""
        ...

    def classes(self, rows: Labeled) -> list[int] | list[str]:
        """Return the labels of the classes, none where there are no classes.

        Raises DataError if all rows have the same label.
        """
        ...

    def encode(self, rows: Labeled, classes: Sequence[str]) -> np.ndarray:
        """Return what a model is to say of each row, ``(rows, …)``; raises DataError for a label that is no class."""
        ...

    def facts(self, labels: np.ndarray) -> dict[str, object]:
        """Return what the report states of the encoded labels of a dataset, as JSON values."""
        ...

    def warnings(
        self, rows: Labeled, evaluation: np.ndarray, classes: Sequence[str], held_out: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield what is odd, as ``check_classes`` does; ``evaluation`` are the encoded labels of these rows."""
        ...

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over rows; ``logits``: fp32 ``(n, outputs)``, ``labels``: encoded, ``(n, …)``."""
        ...

    def outputs(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        """Return ``prediction`` of each row, ``(n, …)``; with labels ``loss``, ``(n,)``, and ``label``, too."""
        ...

    def report(
        self, outputs: Mapping[str, Tensor], classes: Sequence[str], trained: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return the metrics, ``None`` each without rows; ``trained``: the ``facts`` of the training rows."""
        ...

    def lines(
        self, outputs: Mapping[str, Tensor], labels: Sequence[int | str], origins: Origins
    ) -> Iterator[dict[str, object]]:
        """Yield for each row its index, where it came from, its label if it has one, and the prediction.

        ``labels`` are those of the classes, as predictions name them.
        """
        ...

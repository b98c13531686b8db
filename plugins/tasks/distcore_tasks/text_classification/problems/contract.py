"""The protocol of problem types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from distcore import Direction
from distcore_tasks.shared.classification.labels import Labeled
from distcore_tasks.shared.stored_arrays import Entries

if TYPE_CHECKING:
    from torch import Tensor

Origins = Iterable[Mapping[str, object]]
"""Origin of each row, for predictions."""


class Problem(Protocol):
    """Labels, loss, outputs and metrics of a problem type, without state."""

    metrics: ClassVar[dict[str, Direction]]
    """Metrics of every report, with the better direction."""

    def from_csv(self, labels: list[Any]) -> list[Any]:
        """Convert the labels of a CSV file from strings to their types.

        An invalid label stays a string.
        """
        ...

    def label_problems(self, labels: Sequence[object]) -> Iterator[str | None]:
        """Yield an error message for each label, ``None`` for a valid label."""
        ...

    def classes(self, rows: Labeled) -> list[int] | list[str]:
        """Return the labels of the classes; an empty list for a regression.

        Raises DataError if all rows have the same label.
        """
        ...

    def encode(self, rows: Labeled, classes: Sequence[str]) -> Entries:
        """Return the target of each row, ``(rows, …)``; each label is a class."""
        ...

    def facts(self, labels: Entries) -> dict[str, object]:
        """Return the facts about encoded labels for the report, as JSON values."""
        ...

    def warnings(
        self, rows: Labeled, evaluation: Entries, classes: Sequence[str], held_out: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield warnings in the form of ``check_classes``.

        ``evaluation``: encoded labels of the evaluation rows. ``held_out``: True if these
        rows come from ``eval_data``.
        """
        ...

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over rows.

        ``logits``: fp32 ``(n, outputs)``. ``labels``: encoded, ``(n, …)``.
        """
        ...

    def outputs(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        """Return ``prediction`` of each row, ``(n, …)``; with labels also
        ``loss``, ``(n,)``, and ``label``.
        """
        ...

    def report(
        self, outputs: Mapping[str, Tensor], classes: Sequence[str], trained: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return the metrics, each ``None`` without rows.

        ``trained``: the ``facts`` of the training rows.
        """
        ...

    def lines(
        self, outputs: Mapping[str, Tensor], labels: Sequence[int | str], origins: Origins
    ) -> Iterator[dict[str, object]]:
        """Yield index, origin, label (if any) and prediction of each row.

        ``labels`` name the classes in predictions.
        """
        ...

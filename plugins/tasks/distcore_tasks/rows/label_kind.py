"""What labels of rows are: a class, several classes, or a number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

from distcore_tasks.shared.classification.labels import Labeled
from distcore_tasks.shared.stored_arrays import Entries


class LabelKind(Protocol):
    """Labels of one kind, without state."""

    are_numbers: ClassVar[bool]
    """True for numbers, of which each row may have another; False for classes."""

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

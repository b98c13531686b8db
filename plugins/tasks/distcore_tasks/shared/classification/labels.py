"""Labeled rows of any kind, and their classes."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from distcore import DataError, nearest
from distcore_data import ChosenRows, describe_value, pass_over
from distcore_tasks.shared.classification.coded import CodedLabels, CodedTargets
from distcore_tasks.shared.stored_arrays import Entries, StoredArray


class Labeled(Protocol):
    """Rows of one source, each with a label or, for several classes per row, a list of labels."""

    @property
    def name(self) -> str:
        """Name of these rows in error messages, such as ``data file reviews.csv``."""
        ...

    @property
    def labels(self) -> Sequence[Any]:
        """One label, or list of labels, per row: all are integers from 0, or all are strings."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def places(self, rows: Sequence[int]) -> str:
        """Return the places of rows, counted from 0, for messages: ``row 3``, ``rows 3 and 7``."""
        ...

    def problem(self, row: int, what: str) -> DataError:
        """Return the error of a row, counted from 0."""
        ...


def row_places(rows: Sequence[int]) -> str:
    """Implement ``Labeled.places`` for the rows of a file, which messages count from 1."""
    return f"row{'s' * (len(rows) > 1)} {' and '.join(str(row + 1) for row in rows)}"


def label_problem(label: object, first: object, where: str = "row 1 has") -> str | None:
    """Return the problem of a label; ``None`` if it has none.

    ``first``: an earlier label. ``where``: its place.
    """
    if is_null(label):
        return "label is missing (null): fill it in or remove the row"
    # not isinstance, because a bool is an int
    if type(label) is not int and not isinstance(label, str):
        return f"label is {describe_value(label)}, expected an integer or a string"
    if isinstance(label, int) and label < 0:
        return f"label {label} is out of range: integer labels count from 0"
    if isinstance(label, str) and not label.strip():
        return "label is empty: fill it in or remove the row"
    if type(label) is not type(first):
        kind = describe_value(label)
        return f"label is {kind}, but {where} {describe_value(first)}: use one type throughout"
    return None


def is_null(label: object) -> bool:
    """Return True for a missing label: null, or NaN, by which pandas replaces it among floats."""
    is_nan = isinstance(label, float) and label != label
    return label is None or is_nan


def id_problem(named: Sequence[object]) -> str | None:
    """Return the problem of a row's id; ``None`` if it has none.

    ``named``: a list of the id, or empty without one.
    """
    for value in named:
        if isinstance(value, bool) or not isinstance(value, int | str):
            return f"id is {describe_value(value)}, expected an integer or a string"
    return None


def same_but_for_form(names: Iterable[object]) -> tuple[str, str] | None:
    """Return the first two names that are one text in two Unicode forms; ``None`` without them."""
    first_of = dict[str, str]()
    for name in names:
        if not isinstance(name, str) or name.isascii():
            continue
        other = first_of.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            return other, name
    return None


def forms_problem(one: str, other: str) -> str:
    """Return the problem of a text in two Unicode forms, which look alike."""
    forms = " and ".join(_form(name) for name in (one, other))
    return (
        f"{one!r} is there in two Unicode forms ({forms}), so it would be two classes: convert all"
        " labels to NFC"
    )


def _form(name: str) -> str:
    """Return the Unicode form of a name."""
    normal = (form for form in ("NFC", "NFD") if unicodedata.is_normalized(form, name))
    return next(normal, "neither NFC nor NFD")


def each_label(rows: Labeled) -> Iterator[tuple[int, int | str]]:
    """Yield each label with the number of its row, counted from 0."""
    for row, labels in enumerate(rows.labels):
        if isinstance(labels, list):
            yield from ((row, label) for label in labels)
        else:
            yield row, labels


def label_counts(rows: Labeled) -> Counter[int | str]:
    """Return how often each label is there, in the order of their first rows."""
    if not isinstance(rows.labels, CodedLabels):
        return Counter(label for _, label in each_label(rows))
    counts = Counter[int | str]()
    for labels, count in rows.labels.counts():
        for label in labels if isinstance(labels, list) else [labels]:
            counts[label] += count
    return counts


def rows_with(rows: Labeled, texts: Collection[str]) -> Iterator[tuple[int, int | str]]:
    """Yield each label that, as text, is among ``texts``, with the number of its row."""
    labels = rows.labels
    if isinstance(labels, CodedLabels) and not _has_lists(labels):
        codes = [code for code, name in enumerate(labels.names) if str(name) in texts]
        for row in labels.rows_of(codes):
            yield row, labels[row]
        return
    for row, label in each_label(rows):
        if str(label) in texts:
            yield row, label


def _has_lists(labels: CodedLabels) -> bool:
    """Return True if each row has a list of labels."""
    return any(isinstance(name, list) for name in labels.names[:1])


def distinct_labels(rows: Labeled) -> list[int] | list[str]:
    """Return the sorted distinct labels. Their indices are the class numbers.

    Raises DataError if there are fewer than two, or if two are one text in two Unicode forms.
    """
    distinct: list[Any] = [*label_counts(rows)]
    alike = same_but_for_form(distinct)
    if alike:
        first_rows = []
        for name in alike:
            row, _ = next(rows_with(rows, [name]))
            first_rows.append(row)
        where = rows.places(first_rows)
        raise DataError(f"{rows.name}, {where}: label {forms_problem(*alike)}")
    labels: list[int] | list[str] = sorted(distinct)
    if len(labels) < 2:
        problem = "no row has a label"
        if labels:
            problem = f"all {len(rows)} rows have the label {labels[0]!r}"
        raise DataError(f"{rows.name}: {problem}: a classifier needs at least 2 classes")
    return labels


@dataclass(frozen=True, slots=True)
class SomeLabels:
    """Labels of some rows of a source; implements ``Labeled``."""

    rows: Labeled
    """All rows."""
    numbers: np.ndarray
    """Numbers of these among them, int64, ascending."""

    @property
    def name(self) -> str:
        """Name of all rows."""
        return self.rows.name

    @property
    def labels(self) -> Any:
        """One label, or list of labels, per row."""
        labels: Any = self.rows.labels
        if isinstance(labels, CodedLabels):
            return CodedLabels(self._entries(labels.codes), labels.names)
        if isinstance(labels, StoredArray):
            return self._entries(labels)
        return [labels[number] for number in self.numbers.tolist()]

    def _entries(self, array: Any) -> Any:
        """Return the entries of these rows; those in a file stay there."""
        if isinstance(array, StoredArray):
            return array.only(ChosenRows.from_numbers(len(self.rows), self.numbers))
        return array[self.numbers]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.numbers)

    def places(self, rows: Sequence[int]) -> str:
        """Return the places of rows."""
        return self.rows.places(self.numbers[list(rows)].tolist())

    def problem(self, row: int, what: str) -> DataError:
        """Return the error of a row."""
        return self.rows.problem(int(self.numbers[row]), what)


def known_labels(rows: Labeled, classes: Sequence[str]) -> SomeLabels:
    """Return the rows whose labels are all classes; others are bad rows.

    Without ``classes``, as for a regression, these are all rows. Raises DataError for a bad row
    that is not passed over, and if all rows are bad.
    """
    unknown_labels: set[str] = set()
    if classes:
        unknown_labels = {str(label) for label in label_counts(rows)}.difference(classes)
    errors = dict[int, DataError]()
    # Without this check, all labels would be read for nothing.
    unknown = rows_with(rows, unknown_labels) if unknown_labels else ()
    for row, label in unknown:
        if row not in errors:
            hint = _hint(str(label), classes)
            problem = f"label {label!r} is out of range: no training row has it{hint}"
            errors[row] = rows.problem(row, problem)
            pass_over(errors[row])
    if len(errors) == len(rows):
        raise next(iter(errors.values()))
    return SomeLabels(rows, np.delete(np.arange(len(rows)), [*errors]))


def _hint(label: str, classes: Sequence[str]) -> str:
    """Return the end of a message about a label that is none of the classes."""
    if alike := same_but_for_form([*classes, label]):
        return f": {forms_problem(*alike)}"
    names = ", ".join(classes[:20])
    if len(classes) > 20:
        names += ", …"
    return f"{nearest(label, classes)}; training has: {names}"


def class_numbers(rows: Labeled, classes: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield row and class number of each label, of which all are classes."""
    numbers = {name: number for number, name in enumerate(classes)}
    return ((row, numbers[str(label)]) for row, label in each_label(rows))


def encode_labels(rows: Labeled, classes: Sequence[str]) -> Entries:
    """Return the class number of each row, int64 ``(rows,)``; each is a class."""
    if isinstance(rows.labels, CodedLabels):
        return CodedTargets(rows.labels.codes, rows.labels.numbers(classes))
    numbers = (number for _, number in class_numbers(rows, classes))
    return np.fromiter(numbers, np.int64, len(rows))

"""Labeled rows of any kind: their classes, and the split into datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from distcore import DataError, nearest
from distcore_data import describe_value, pass_over
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.sources import naming
from distcore_tasks.shared.splits import split_rows


class Labeled(Protocol):
    """Rows of one source, each with a label or, for several classes per row, a list of labels."""

    @property
    def name(self) -> str:
        """Name of these rows in error messages, such as ``data file reviews.csv``."""
        ...

    @property
    def labels(self) -> Sequence[Any]:
        """One label, or list of labels, per row: all labels are integers from 0, or all are strings."""
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


@dataclass(frozen=True, eq=False, slots=True)
class CodedLabels(Sequence[Any]):
    """Labels of very many rows, of which each distinct one is in memory once."""

    codes: np.ndarray
    """Place of the label of each row among ``names``, integers ``(rows,)``."""
    names: Sequence[Any]
    """The distinct labels."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.codes)

    def __getitem__(self, row: Any) -> Any:
        """Return the label of a row."""
        return self.names[self.codes[row]]

    def __iter__(self) -> Iterator[Any]:
        """Yield the label of each row."""
        return map(self.names.__getitem__, self.codes)


R = TypeVar("R", bound=Labeled)


def row_places(rows: Sequence[int]) -> str:
    """Implement ``Labeled.places`` for the rows of a file, which messages count from 1."""
    return f"row{'s' * (len(rows) > 1)} {' and '.join(str(row + 1) for row in rows)}"


def label_problem(label: object, first: object, where: str = "row 1 has") -> str | None:
    """Return the problem of a label; ``None`` if it has none. ``first``: an earlier label. ``where``: its place."""
    if type(label) is not int and not isinstance(label, str):  # not isinstance, because a bool is an int
        return f"label is {describe_value(label)}, expected an integer or a string"
    if isinstance(label, int) and label < 0:
        return f"label {label} is out of range: integer labels count from 0"
    if isinstance(label, str) and not label.strip():
        return "label is empty: fill it in or remove the row"
    if type(label) is not type(first):
        kind = describe_value(label)
        return f"label is {kind}, but {where} {describe_value(first)}: use one type throughout"
    return None


def id_problem(named: Sequence[object]) -> str | None:
    """Return the problem of a row's id; ``None`` if it has none. ``named``: a list of the id, or empty without one."""
    wrong = [value for value in named if isinstance(value, bool) or not isinstance(value, int | str)]
    return f"id is {describe_value(wrong[0])}, expected an integer or a string" if wrong else None


def each_label(rows: Labeled) -> Iterator[tuple[int, int | str]]:
    """Yield each label with the number of its row, counted from 0."""
    for row, labels in enumerate(rows.labels):
        if isinstance(labels, list):
            yield from ((row, label) for label in labels)
        else:
            yield row, labels


def distinct_labels(rows: Labeled) -> list[int] | list[str]:
    """Return the sorted distinct labels. Their indices are the class numbers.

    Raises DataError if there are fewer than two.
    """
    distinct: set[Any] = {label for _, label in each_label(rows)}
    labels: list[int] | list[str] = sorted(distinct)
    if len(labels) < 2:
        problem = f"all {len(rows)} rows have the label {labels[0]!r}" if labels else "no row has a label"
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
    def labels(self) -> Sequence[Any]:
        """One label, or list of labels, per row."""
        if isinstance(self.rows.labels, CodedLabels):
            return CodedLabels(self.rows.labels.codes[self.numbers], self.rows.labels.names)
        return [self.rows.labels[number] for number in self.numbers.tolist()]

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
    """Return the rows whose labels are all classes; others are bad rows. Raises DataError if they are not passed over.

    All rows are if there are no ``classes``, as for a regression.
    """
    known, unknown = set(classes), dict[int, DataError]()
    for row, label in each_label(rows) if classes else ():
        if str(label) not in known and row not in unknown:
            names = ", ".join(classes[:20]) + (", …" if len(classes) > 20 else "")
            hint = f"{nearest(str(label), classes)}; training has: {names}"
            unknown[row] = rows.problem(row, f"label {label!r} is out of range: no training row has it{hint}")
            pass_over(unknown[row])
    if len(unknown) == len(rows):
        raise next(iter(unknown.values()))
    return SomeLabels(rows, np.delete(np.arange(len(rows)), [*unknown]))


def class_numbers(rows: Labeled, classes: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield row and class number of each label, of which all are classes."""
    numbers = {name: number for number, name in enumerate(classes)}
    return ((row, numbers[str(label)]) for row, label in each_label(rows))


def encode_labels(rows: Labeled, classes: Sequence[str]) -> np.ndarray:
    """Return the class number of each row, int64 ``(rows,)``; each label is a class."""
    if isinstance(rows.labels, CodedLabels):
        numbers = {name: number for number, name in enumerate(classes)}
        by_code: np.ndarray = np.array([numbers.get(str(name), -1) for name in rows.labels.names], np.int64)
        coded: np.ndarray = by_code[rows.labels.codes]
        return coded
    return np.fromiter((number for _, number in class_numbers(rows, classes)), np.int64, len(rows))


def split_parts(
    rows: R,
    classes: Sequence[str],
    encode: Callable[[Labeled], np.ndarray],
    options: TaskOptions,
    seed: int,
    read: Callable[[str], R],
) -> Iterator[tuple[str, R, np.ndarray, np.ndarray]]:
    """Yield for each dataset its name, its source, its row numbers in the source, and its encoded labels.

    ``rows`` are those of the training source, and have all ``classes``; ``read`` opens another source, whose rows with
    other labels are bad rows. ``encode`` returns labels as an array. If they are class numbers, int64 ``(rows,)``,
    training keeps a row of each class. Without ``test_data`` there is no ``test``, and the evaluation rows serve as
    test rows. Raises DataError.
    """
    labels = encode(rows)
    if options.eval_data is None:
        train, evaluation = split_rows(rows.name, len(rows), options.eval_fraction, seed, _strata(labels))
        yield "train", rows, train, labels[train]
        yield "evaluation", rows, evaluation, labels[evaluation]
    else:
        yield "train", rows, np.arange(len(rows)), labels
    for name, source in options.held_out.items():
        with naming(name):
            others = read(source)
            known = known_labels(others, classes)
        yield name, others, known.numbers, encode(known)


def _strata(labels: np.ndarray) -> np.ndarray:
    """Return class numbers unchanged, and zeros for other labels, which makes one class of all rows."""
    return labels if labels.dtype == np.int64 and labels.ndim == 1 else np.zeros(len(labels), np.int64)

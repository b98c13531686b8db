"""Labeled rows: their classes, and the datasets that they are split into. For texts, images and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from distcore import DataError, nearest
from distcore.data import describe_value
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.splits import split_rows


class Labeled(Protocol):
    """Rows of one source, each with a label or, where several classes may apply, with a list of labels."""

    @property
    def name(self) -> str:
        """What error messages call these rows, such as ``data file reviews.csv``."""
        ...

    @property
    def labels(self) -> Sequence[Any]:
        """One label, or list of labels, per row: all labels are integers from 0, or all are strings."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def places(self, rows: Sequence[int]) -> str:
        """Return how messages say where these rows are, which count from 0: ``row 3``, ``rows 3 and 7``."""
        ...


R = TypeVar("R", bound=Labeled)


def row_places(rows: Sequence[int]) -> str:
    """Return what ``Labeled.places`` does for the rows of a file, which messages count from 1."""
    return f"row{'s' * (len(rows) > 1)} {' and '.join(str(row + 1) for row in rows)}"


def row_problem(rows: Labeled, row: int, problem: str) -> DataError:
    """Return the error for a row, counted from 0."""
    return DataError(f"{rows.name}, {rows.places([row])}: {problem}")


def label_problem(label: object, first: object, where: str = "row 1 has") -> str | None:
    """Return what is wrong with a label, ``first`` being the one that ``where`` speaks of; ``None`` if nothing is."""
    if type(label) is not int and not isinstance(label, str):  # not isinstance of int: a boolean is one too
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
    """Return what is wrong with the id of a row, in a list of its own or missing; ``None`` if nothing is."""
    wrong = [value for value in named if isinstance(value, bool) or not isinstance(value, int | str)]
    return f"id is {describe_value(wrong[0])}, expected an integer or a string" if wrong else None


def each_label(rows: Labeled) -> Iterator[tuple[int, int | str]]:
    """Yield the number of a row, counted from 0, with each label that it has."""
    for row, labels in enumerate(rows.labels):
        if isinstance(labels, list):
            yield from ((row, label) for label in labels)
        else:
            yield row, labels


def distinct_labels(rows: Labeled) -> list[int] | list[str]:
    """Return the distinct labels, sorted: class ``i`` is the ``i``-th of them.

    Raises DataError if there are fewer than two.
    """
    distinct: set[Any] = {label for _, label in each_label(rows)}
    labels: list[int] | list[str] = sorted(distinct)
    if len(labels) < 2:
        problem = f"all {len(rows)} rows have the label {labels[0]!r}" if labels else "no row has a label"
        raise DataError(f"{rows.name}: {problem}: a classifier needs at least 2 classes")
    return labels


def class_numbers(rows: Labeled, classes: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield what ``each_label`` does, with class numbers; raises DataError for a label that is not a class."""
    numbers = {name: number for number, name in enumerate(classes)}
    for row, label in each_label(rows):
        if str(label) not in numbers:
            known = ", ".join(classes[:20]) + (", …" if len(classes) > 20 else "")
            hint = f"{nearest(str(label), classes)}; training has: {known}"
            raise row_problem(rows, row, f"label {label!r} is out of range: no training row has it{hint}")
        yield row, numbers[str(label)]


def encode_labels(rows: Labeled, classes: Sequence[str]) -> np.ndarray:
    """Return the class number of each row, int64 ``(rows,)``; raises DataError for a label that is not a class."""
    return np.fromiter((number for _, number in class_numbers(rows, classes)), np.int64, len(rows))


def split_parts(
    rows: R, encode: Callable[[R], np.ndarray], options: TaskOptions, seed: int, read: Callable[[str], R]
) -> Iterator[tuple[str, R, np.ndarray, np.ndarray]]:
    """Yield for each dataset its name, the source of its rows, which of them it has, and their encoded labels.

    ``rows`` are those of the training source, and ``read`` opens another one. ``encode`` returns the labels of all rows
    of a source as an array; where these are class numbers, int64 ``(rows,)``, each class stays in training. Without
    ``test_data`` there is no ``test``: the evaluation rows serve as test. Raises DataError.
    """
    labels = encode(rows)
    if options.eval_data is None:
        train, evaluation = split_rows(rows.name, len(rows), options.eval_fraction, seed, _strata(labels))
        yield "train", rows, train, labels[train]
        yield "evaluation", rows, evaluation, labels[evaluation]
    else:
        yield "train", rows, np.arange(len(rows)), labels
    for name, source in (("evaluation", options.eval_data), ("test", options.test_data)):
        if source is not None:
            others = read(source)
            yield name, others, np.arange(len(others)), encode(others)


def _strata(labels: np.ndarray) -> np.ndarray:
    """Return class numbers as they are; of other labels each row may be in evaluation, as long as one is left."""
    return labels if labels.dtype == np.int64 and labels.ndim == 1 else np.zeros(len(labels), np.int64)

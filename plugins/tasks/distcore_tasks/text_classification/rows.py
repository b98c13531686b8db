"""Read and check labeled texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import Record, Source, data_format, pass_over, row_error
from distcore_tasks.shared import source_rows
from distcore_tasks.shared.classification.labels import id_problem, row_places
from distcore_tasks.shared.lazy_rows import Values, picked
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.source_rows import Rows, given_rows
from distcore_tasks.shared.sources import text_problem
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.problems import PROBLEMS
from distcore_tasks.text_classification.problems.contract import Problem

SINGLE_LABEL = PROBLEMS["single_label"]


@dataclass(frozen=True, slots=True)
class LabeledTexts:
    """Texts and their labels, in file order."""

    name: str
    """Name of these rows in error messages, such as ``data file reviews.csv``."""
    texts: Values[str]
    """Texts, none of them blank, all valid Unicode."""
    labels: Sequence[Any]
    """One label per text, as the problem type requires. Single classes are all integers
    from 0, or all strings.
    """
    ids: Values[int | str] | None = None
    """The user's id of each row; ``None`` without a column of ids."""
    seconds: Values[str] | None = None
    """The second text of each row; ``None`` if rows have one text."""
    records: Rows[Record] | None = None
    """What was read; ``None``: these rows alone."""
    kept: Sequence[int] = ()
    """Places of these rows among the records."""

    def __len__(self) -> int:
        return len(self.texts)

    def number(self, row: int) -> int:
        """Return the number of a row in its source, both from 0."""
        return self.records.number(self.kept[row]) if self.records else row

    def places(self, rows: Sequence[int]) -> str:
        """Return ``row 3`` or ``rows 3 and 7``, counted from 1; the numbers in
        ``rows`` count from 0.
        """
        return row_places([self.number(row) for row in rows])

    def problem(self, row: int, what: str) -> DataError:
        """Return the error of a row, counted from 0."""
        return (
            self.records.problem(self.kept[row], what)
            if self.records
            else row_error(self.name, row + 1, what)
        )


@dataclass(frozen=True, eq=False, slots=True)
class ColumnValues:
    """The values of a column; implements ``Values`` and ``Pickable``."""

    records: Values[Record]
    """All records."""
    column: int
    """Place of the value in a record."""
    kept: np.ndarray | None
    """Places of the records with these values, int64, ascending; ``None``: all."""

    def __len__(self) -> int:
        return len(self.records if self.kept is None else self.kept)

    def __iter__(self) -> Iterator[Any]:
        """Yield the values in order."""
        return self.each(np.arange(len(self)))

    def each(self, places: np.ndarray) -> Iterator[Any]:
        """Yield the values at ``places``, int64, ascending."""
        kept = places if self.kept is None else self.kept[places]
        return (record[self.column] for record in picked(self.records, kept))


OTHERS = (
    ("preference", {"prompt", "chosen", "rejected"}),
    ("causal-lm", {"prompt", "completion"}),
    ("causal-lm", {"messages"}),
    ("seq2seq", {"source", "target"}),
    ("token-classification", {"tokens", "tags"}),
    ("embedding", {"anchor", "positive"}),
)
"""Other tasks, and columns that are theirs."""


@contextmanager
def _naming_others() -> Iterator[None]:
    """Add to the error of a missing column the task whose columns there are."""
    try:
        yield
    except DataError as error:
        listed = re.search(r"\(found: (.*?)\)", str(error))
        there = set(listed[1].split(", ")) if listed else set()
        task = next((task for task, columns in OTHERS if columns <= there), None)
        raise DataError(f"{error}, or train with --task {task}") if task else error from None


def read_rows(source: Source, columns: Columns, problem: Problem = SINGLE_LABEL) -> LabeledTexts:
    """Read text and label of each row of a file or split, and second text and id
    if ``columns`` names them.

    Raises DataError with the row (counted from 1, without a header), the problem and the remedy.
    """
    kept = _Kept(columns)
    with _naming_others():
        records = source_rows.read_rows(source, schema_of(columns), kept.add)
    return _rows(records, kept, problem, csv=data_format(source) == ".csv")


def checked_rows(
    records: Rows[Record], columns: Columns, problem: Problem, *, csv: bool = False
) -> LabeledTexts:
    """Return records as rows after a pass over their labels. Raises DataError."""
    kept = _Kept(columns)
    for record in records.values:
        kept.add(record)
    return _rows(records, kept, problem, csv=csv)


def schema_of(columns: Columns) -> Schema[Record]:
    """Return what is read of a row. Labels are checked when all are known."""
    return Schema(columns.settings(), partial(record_problem, columns_of(columns)), tuple)


def check_rows(
    name: str,
    records: Iterable[tuple[object, ...]],
    columns: Columns = Columns(),  # noqa: B008
) -> LabeledTexts:
    """Return checked records with one class each. Raises DataError with a message
    that starts with ``name``.
    """
    return checked_rows(given_rows(name, records, schema_of(columns)), columns, SINGLE_LABEL)


class _Kept:
    """Labels and ids of all records, which alone stay in memory."""

    def __init__(self, columns: Columns) -> None:
        self.places = {column: place for place, column in enumerate(columns_of(columns))}
        self.known: dict[str, str] = {}
        self.values: dict[str, list[Any]] = {
            column: [] for column in ("label", "id") if column in self.places
        }

    def add(self, record: Record) -> None:
        """Keep those of one more record."""
        for column, values in self.values.items():
            value = record[self.places[column]]
            values.append(self.known.setdefault(value, value) if isinstance(value, str) else value)


def _rows(
    records: Rows[Record], kept: _Kept, problem: Problem, *, csv: bool = False
) -> LabeledTexts:
    """Check labels, and return the records as rows."""
    places = kept.places
    labels, good = _good_labels(records, kept.values["label"], problem, csv)
    every = np.asarray(good, np.int64)
    texts, seconds = (
        ColumnValues(records.values, places[name], every) if name in places else None
        for name in ("text", "text_pair")
    )
    assert texts
    ids = [kept.values["id"][place] for place in good] if "id" in places else None
    return LabeledTexts(records.name, texts, labels, ids, seconds, records, good)


def _good_labels(
    records: Rows[Record], given: Sequence[Any], problem: Problem, csv: bool
) -> tuple[list[Any], Sequence[int]]:
    """Return the labels, and their places: all of them, or those that are no bad ones,
    which are passed over.
    """
    good: Sequence[int] = range(len(given))
    while True:
        some = [given[place] for place in good]
        labels = problem.from_csv(some) if csv else some
        wrong = {
            place: what
            for place, what in zip(good, problem.label_problems(labels), strict=True)
            if what
        }
        if not wrong:
            return labels, good
        errors = [records.problem(place, what) for place, what in wrong.items()]
        for error in errors:
            pass_over(error)
        if len(wrong) == len(good):
            raise errors[0]
        # those of a CSV file may be integers now
        good = [place for place in good if place not in wrong]


def columns_of(columns: Columns, labeled: bool = True) -> list[str]:
    """Return the columns of a record, in order: some of ``text``,
    ``text_pair``, ``label`` and ``id``.
    """
    return [setting.rpartition(".")[2] for setting in columns.settings(labeled)]


def record_problem(names: Sequence[str], record: Record) -> str | None:
    """Return the error in a record's texts or id, ``None`` for a valid record. ``names``:
    those of its columns.
    """
    # a pass over all rows spends much of its time here
    for name, value in zip(names, record, strict=True):
        if name in ("text", "text_pair"):
            problem = text_problem(value, name)
        else:
            problem = id_problem([value]) if name == "id" else None
        if problem:
            return problem
    return None

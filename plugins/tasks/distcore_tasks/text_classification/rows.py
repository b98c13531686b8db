"""Read and check labeled texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distcore import DataError
from distcore_data import Record, Source, data_format, read_records, row_error, source_name
from distcore_tasks.shared.classification.labels import id_problem, row_places
from distcore_tasks.shared.lazy_rows import LazyValues, Values, read_values
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
    labels: list[Any]
    """One label per text, as the problem type requires. Single classes are all integers from 0, or all strings."""
    ids: list[int | str] | None = None
    """The user's id of each row; ``None`` without a column of ids."""
    seconds: Values[str] | None = None
    """The second text of each row; ``None`` if rows have one text."""

    def __len__(self) -> int:
        return len(self.texts)

    def places(self, rows: Sequence[int]) -> str:
        """Return ``row 3`` or ``rows 3 and 7``, counted from 1; the numbers in ``rows`` count from 0."""
        return row_places(rows)


def read_rows(source: Source, columns: Columns, problem: Problem = SINGLE_LABEL) -> LabeledTexts:
    """Read text and label of each row of a file or split, and second text and id if ``columns`` names them.

    Raises DataError with the row (counted from 1, without a header), the problem and the remedy.
    """
    name, asked = source_name(source), columns.settings()
    kept = _Kept(columns)
    records = read_values(source, lambda: _checked(name, read_records(source, asked), columns), kept.add)
    return _rows(name, records, kept, problem, csv=data_format(source) == ".csv")


def check_rows(name: str, records: Iterable[tuple[object, ...]], columns: Columns = Columns()) -> LabeledTexts:  # noqa: B008
    """Return checked records with one class each. Raises DataError with a message that starts with ``name``."""
    rows, kept = list(_checked(name, records, columns)), _Kept(columns)
    for row in rows:
        kept.add(row)
    return _rows(name, rows, kept, SINGLE_LABEL)


class _Kept:
    """Labels and ids of all records, which alone stay in memory."""

    def __init__(self, columns: Columns) -> None:
        self.places = {column: place for place, column in enumerate(columns_of(columns))}
        self.values: dict[str, list[Any]] = {column: [] for column in ("label", "id") if column in self.places}

    def add(self, record: Record) -> None:
        """Keep those of one more record."""
        for column, values in self.values.items():
            values.append(record[self.places[column]])


def _checked(name: str, records: Iterable[tuple[object, ...]], columns: Columns) -> Iterator[Record]:
    """Yield the records. Raises DataError for an invalid text or id."""
    names = columns_of(columns)
    for number, record in enumerate(records, 1):
        if wrong := record_problem(dict(zip(names, record, strict=True))):
            raise row_error(name, number, wrong)
        yield record


def _rows(name: str, records: Values[Record], kept: _Kept, problem: Problem, *, csv: bool = False) -> LabeledTexts:
    """Check labels, and return the records as rows."""
    if not len(records):
        raise DataError(f"{name}: holds no rows")
    places, labels = kept.places, kept.values["label"]
    labels = problem.from_csv(labels) if csv else labels
    for number, wrong in enumerate(problem.label_problems(labels), 1):
        if wrong:
            raise row_error(name, number, wrong)

    def texts(column: str) -> LazyValues[str]:
        return LazyValues(lambda: (str(record[places[column]]) for record in records), len(records))

    seconds = texts("text_pair") if "text_pair" in places else None
    return LabeledTexts(name, texts("text"), labels, kept.values.get("id"), seconds)


def columns_of(columns: Columns, labeled: bool = True) -> list[str]:
    """Return the columns of a record, in order: some of ``text``, ``text_pair``, ``label`` and ``id``."""
    return [setting.rpartition(".")[2] for setting in columns.settings(labeled)]


def record_problem(record: Mapping[str, object]) -> str | None:
    """Return the error in a record's texts or id, ``None`` for a valid record. ``record``: values by column."""
    texts = (text_problem(record[name], name) for name in ("text", "text_pair") if name in record)
    return next(filter(None, texts), None) or id_problem([record["id"]] if "id" in record else [])

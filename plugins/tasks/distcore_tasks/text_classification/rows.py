"""Labeled texts: the rows of a text-classification dataset, checked one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distcore import DataError
from distcore.data import Record, Source, data_format, read_records, row_error, source_name
from distcore_tasks.shared.classification.labels import id_problem, row_places
from distcore_tasks.shared.lazy_rows import Reread, Values, kept
from distcore_tasks.shared.sources import text_problem
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.problems import PROBLEMS
from distcore_tasks.text_classification.problems.contract import Problem

SINGLE_LABEL = PROBLEMS["single_label"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Texts and their labels, in file order."""

    name: str
    """What error messages call these rows, such as ``data file reviews.csv``."""
    texts: Values[str]
    """Not blank, and valid Unicode."""
    labels: list[Any]
    """One per text, as the ``Problem`` at hand has them; of one class per text: all integers from 0, or all strings."""
    ids: list[int | str] | None = None
    """One per text: what the user calls the row. ``None`` where no column says it."""
    seconds: Values[str] | None = None
    """The second text of each row, like the first. ``None`` where rows have one text."""

    def __len__(self) -> int:
        return len(self.texts)

    def places(self, rows: Sequence[int]) -> str:
        """Return ``row 3``, ``rows 3 and 7``: counted from 1, while ``rows`` count from 0."""
        return row_places(rows)


def read_rows(source: Source, columns: Columns, problem: Problem = SINGLE_LABEL) -> Rows:
    """Read a file or split with a text and a label per row and, if columns are named for them, a second text and an id.

    Raises DataError: where, the row (counted from 1, without a header), what was found and what to do.
    """
    name, asked = source_name(source), columns.settings()
    records = kept(source, lambda: _checked(name, read_records(source, asked), columns))
    return _rows(name, records, columns, problem, csv=data_format(source) == ".csv")


def check_rows(name: str, records: Iterable[tuple[object, ...]], columns: Columns = Columns()) -> Rows:  # noqa: B008
    """Check records of ``columns`` with one class each; ``name`` opens every message. Raises DataError."""
    return _rows(name, list(_checked(name, records, columns)), columns, SINGLE_LABEL)


def _checked(name: str, records: Iterable[tuple[object, ...]], columns: Columns) -> Iterator[Record]:
    """Yield the records, whose texts and ids have been looked at."""
    names = columns_of(columns)
    for number, record in enumerate(records, 1):
        if wrong := record_problem(dict(zip(names, record, strict=True))):
            raise row_error(name, number, wrong)
        yield record


def _rows(name: str, records: Values[Record], columns: Columns, problem: Problem, *, csv: bool = False) -> Rows:
    """Return checked records as rows, whose labels are looked at here; only labels and ids are kept in memory."""
    if not len(records):
        raise DataError(f"{name}: holds no rows")
    places = {column: place for place, column in enumerate(columns_of(columns))}
    columns_read: dict[str, list[Any]] = {column: [] for column in ("label", "id") if column in places}
    for record in records:
        for column, values in columns_read.items():
            values.append(record[places[column]])
    labels = problem.from_csv(columns_read["label"]) if csv else columns_read["label"]
    for number, wrong in enumerate(problem.label_problems(labels), 1):
        if wrong:
            raise row_error(name, number, wrong)

    def texts(column: str) -> Reread[str]:
        return Reread(lambda: (str(record[places[column]]) for record in records), len(records))

    seconds = texts("text_pair") if "text_pair" in places else None
    return Rows(name, texts("text"), labels, columns_read.get("id"), seconds)


def columns_of(columns: Columns, labeled: bool = True) -> list[str]:
    """Return which columns a record has, in order: some of ``text``, ``text_pair``, ``label`` and ``id``."""
    return [setting.rpartition(".")[2] for setting in columns.settings(labeled)]


def record_problem(record: Mapping[str, object]) -> str | None:
    """Return what is wrong with the texts or the id of a record, by column; ``None`` if nothing is."""
    texts = (text_problem(record[name], name) for name in ("text", "text_pair") if name in record)
    return next(filter(None, texts), None) or id_problem([record["id"]] if "id" in record else [])

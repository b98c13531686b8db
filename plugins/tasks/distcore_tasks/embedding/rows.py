"""Read and check rows: an anchor, a text that belongs to it and, with a column of negatives, one that does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distcore import DataError
from distcore_data import Source, read_records, row_error, source_name
from distcore_tasks.embedding.options import Columns
from distcore_tasks.shared.lazy_rows import Values, read_values
from distcore_tasks.shared.sources import text_problem

Texts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows in file order; implements ``distcore_tasks.shared.splits.Rows``."""

    name: str
    """Name of these rows in error messages, such as ``data file pairs.jsonl``."""
    values: Values[Texts]
    """The texts of each row, none of them blank: anchor, positive and, if rows have one, negative."""


def read_groups(source: Source, columns: Columns) -> Groups:
    """Read a data file or split. Raises DataError with the row, counted from 1, its problem and the remedy."""
    name, asked = source_name(source), {f"columns.{role}": str(getattr(columns, role)) for role in columns.names}
    values = read_values(source, lambda: checked(name, read_records(source, asked), columns.names))
    return _require_rows(Groups(name, values))


def check_groups(name: str, records: Iterable[tuple[object, ...]]) -> Groups:
    """Return checked pairs. Raises DataError with a message that starts with ``name``."""
    return _require_rows(Groups(name, list(checked(name, records, Columns().names))))


def checked(name: str, records: Iterable[tuple[object, ...]], names: Sequence[str], start: int = 1) -> Iterator[Texts]:
    """Yield checked records, whose texts are ``names``. Raises DataError with the row, counted from ``start``."""
    for number, record in enumerate(records, start):
        if problem := next(filter(None, map(text_problem, record, names)), None):
            raise row_error(name, number, problem)
        yield tuple(map(str, record))


def _require_rows(rows: Groups) -> Groups:
    if not len(rows.values):
        raise DataError(f"{rows.name}: holds no rows")
    return rows

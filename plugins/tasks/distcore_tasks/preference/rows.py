"""Read and check preferences: a prompt with a better and a worse answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from distcore import DataError
from distcore_data import Source, read_records, row_error, source_name
from distcore_tasks.preference.options import Columns
from distcore_tasks.shared.lazy_rows import Values, read_values
from distcore_tasks.shared.sources import text_problem

NAMES = ("prompt", "chosen", "rejected")
"""Names of the three texts of a row in messages."""
Texts = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Preferences:
    """Rows in file order; implements ``distcore_tasks.shared.splits.Rows``."""

    name: str
    """Name of these rows in error messages, such as ``data file pairs.jsonl``."""
    values: Values[Texts]
    """Prompt, chosen and rejected answer of each row, none of them blank."""


def read_preferences(source: Source, columns: Columns) -> Preferences:
    """Read a data file or split. Raises DataError with the row, counted from 1, its problem and the remedy."""
    name, asked = source_name(source), {f"columns.{column}": name for column, name in asdict(columns).items()}
    return _require_rows(Preferences(name, read_values(source, lambda: checked(name, read_records(source, asked)))))


def check_preferences(name: str, records: Iterable[tuple[object, ...]]) -> Preferences:
    """Return checked records. Raises DataError with a message that starts with ``name``."""
    return _require_rows(Preferences(name, list(checked(name, records))))


def checked(name: str, records: Iterable[tuple[object, ...]], start: int = 1) -> Iterator[Texts]:
    """Yield checked records. Raises DataError with the number of the row, counted from ``start``."""
    for number, record in enumerate(records, start):
        if problem := next(filter(None, map(text_problem, record, NAMES)), None):
            raise row_error(name, number, problem)
        prompt, chosen, rejected = map(str, record)
        yield prompt, chosen, rejected


def _require_rows(rows: Preferences) -> Preferences:
    if not len(rows.values):
        raise DataError(f"{rows.name}: holds no rows")
    return rows

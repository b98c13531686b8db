"""Read and check the texts of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from distcore import DataError
from distcore_data import Record, Source, read_records, row_error, source_name
from distcore_tasks.masked_lm.options import Columns
from distcore_tasks.shared.lazy_rows import Values, read_values
from distcore_tasks.shared.sources import text_problem
from distcore_tasks.shared.streams.values import Check, choose_values


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in file order; implements ``distcore_tasks.shared.splits.Rows``."""

    name: str
    """Name of these rows in error messages, such as ``data file texts.jsonl``."""
    values: Values[str]
    """Texts, none of them blank, all valid Unicode."""


def read_texts(source: Source, columns: Columns) -> Texts:
    """Read a data file or split. Raises DataError with the row, counted from 1, its problem and the remedy."""
    name, asked = source_name(source), text_columns(columns)
    values = read_values(source, lambda: _checked(name, enumerate(read_records(source, asked), 1)))
    return _require_rows(Texts(name, values))


def stream_texts(source: Source, columns: Columns, most_bad_rows: int) -> Texts:
    """Return the texts of a data file or split by number. Raises DataError."""
    values = choose_values(source, text_columns(columns), text_check(source), most_bad_rows)
    return _require_rows(Texts(source_name(source), values))


def text_columns(columns: Columns) -> dict[str, str]:
    """Return the columns of a file by config key."""
    return {f"columns.{column}": name for column, name in asdict(columns).items()}


def text_check(source: Source) -> Check[str]:
    """Return the function that makes texts of records. It raises DataError for one that cannot be used."""
    return partial(_checked, source_name(source))


def check_texts(name: str, texts: Iterable[object]) -> Texts:
    """Return checked texts. Raises DataError with a message that starts with ``name``."""
    return _require_rows(Texts(name, list(_checked(name, enumerate(((text,) for text in texts), 1)))))


def _require_rows(texts: Texts) -> Texts:
    if not len(texts.values):
        raise DataError(f"{texts.name}: holds no rows")
    return texts


def _checked(name: str, records: Iterable[tuple[int, Record]]) -> Iterator[str]:
    for number, (text,) in records:
        if problem := text_problem(text):
            raise row_error(name, number, problem)
        yield str(text)

"""Read and check the texts of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from distcore import DataError
from distcore_data import Source, read_records, row_error, source_name
from distcore_tasks.masked_lm.options import Columns
from distcore_tasks.shared.lazy_rows import Values, read_values
from distcore_tasks.shared.sources import text_problem


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in file order; implements ``distcore_tasks.shared.splits.Rows``."""

    name: str
    """Name of these rows in error messages, such as ``data file texts.jsonl``."""
    values: Values[str]
    """Texts, none of them blank, all valid Unicode."""


def read_texts(source: Source, columns: Columns) -> Texts:
    """Read a data file or split. Raises DataError with the row, counted from 1, its problem and the remedy."""
    name, asked = source_name(source), {f"columns.{column}": name for column, name in asdict(columns).items()}
    return _require_rows(
        Texts(name, read_values(source, lambda: _checked(name, (text for (text,) in read_records(source, asked)))))
    )


def check_texts(name: str, texts: Iterable[object]) -> Texts:
    """Return checked texts. Raises DataError with a message that starts with ``name``."""
    return _require_rows(Texts(name, list(_checked(name, texts))))


def _require_rows(texts: Texts) -> Texts:
    if not len(texts.values):
        raise DataError(f"{texts.name}: holds no rows")
    return texts


def _checked(name: str, texts: Iterable[object]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        if problem := text_problem(text):
            raise row_error(name, number, problem)
        yield str(text)

"""Texts of a file, checked one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from distcore import DataError
from distcore.data import Source, read_records, row_error, source_name
from distcore_tasks.masked_lm.options import Columns
from distcore_tasks.shared.lazy_rows import Values, kept
from distcore_tasks.shared.sources import text_problem


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in file order; implements ``distcore_tasks.shared.splits.Rows``."""

    name: str
    """What error messages call these rows, such as ``data file texts.jsonl``."""
    values: Values[str]
    """Not blank, and valid Unicode."""


def read_texts(source: Source, columns: Columns) -> Texts:
    """Read a data file or split; raises DataError: where, the row (counted from 1), what was found and what to do."""
    name, asked = source_name(source), {f"columns.{column}": name for column, name in asdict(columns).items()}
    return _some(Texts(name, kept(source, lambda: _checked(name, (text for (text,) in read_records(source, asked))))))


def check_texts(name: str, texts: Iterable[object]) -> Texts:
    """Check the texts one by one; ``name`` opens every message. Raises DataError."""
    return _some(Texts(name, list(_checked(name, texts))))


def _some(texts: Texts) -> Texts:
    if not len(texts.values):
        raise DataError(f"{texts.name}: holds no rows")
    return texts


def _checked(name: str, texts: Iterable[object]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        if problem := text_problem(text):
            raise row_error(name, number, problem)
        yield str(text)

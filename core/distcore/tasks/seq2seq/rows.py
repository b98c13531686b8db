"""Pairs of texts, checked one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from distcore.data.files import read_records, row_error
from distcore.errors import DataError
from distcore.tasks.seq2seq.options import Columns
from distcore.tasks.sources import text_problem

NAMES = ("source", "target")
"""What messages call the two texts of a pair."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows in file order; implements ``distcore.tasks.parts.Rows``."""

    name: str
    """What error messages call these rows, such as ``data file pairs.jsonl``."""
    values: list[tuple[str, str]]
    """Source and target of each, neither of them blank."""


def read_pairs(path: Path, columns: Columns) -> Pairs:
    """Read a data file; raises DataError: the file, the row (counted from 1), what was found and what to do."""
    asked = {f"columns.{column}": name for column, name in asdict(columns).items()}
    return check_pairs(f"data file {path}", read_records(path, asked))


def check_pairs(name: str, records: Iterable[tuple[object, ...]]) -> Pairs:
    """Check (source, target) records one by one; ``name`` opens every message. Raises DataError."""
    values: list[tuple[str, str]] = []
    for number, record in enumerate(records, 1):
        if problem := next(filter(None, map(text_problem, record, NAMES)), None):
            raise row_error(name, number, problem)
        source, target = record
        values.append((str(source), str(target)))
    if not values:
        raise DataError(f"{name}: holds no rows")
    return Pairs(name, values)

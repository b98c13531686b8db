"""Read and check pairs of texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from distcore import DataError
from distcore_data import Source, read_records, row_error, source_name
from distcore_tasks.seq2seq.options import Columns
from distcore_tasks.shared.lazy_rows import Values, read_values
from distcore_tasks.shared.sources import text_problem

NAMES = ("source", "target")
"""Names of the two texts of a pair in messages."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows in file order; implements ``distcore_tasks.shared.splits.Rows``."""

    name: str
    """Name of these rows in error messages, such as ``data file pairs.jsonl``."""
    values: Values[tuple[str, str]]
    """Source and target of each row, neither of them blank."""


def read_pairs(source: Source, columns: Columns) -> Pairs:
    """Read a data file or split. Raises DataError with the row, counted from 1, its problem and the remedy."""
    name, asked = source_name(source), {f"columns.{column}": name for column, name in asdict(columns).items()}
    return _require_rows(Pairs(name, read_values(source, lambda: _checked(name, read_records(source, asked)))))


def check_pairs(name: str, records: Iterable[tuple[object, ...]]) -> Pairs:
    """Return checked (source, target) records. Raises DataError with a message that starts with ``name``."""
    return _require_rows(Pairs(name, list(_checked(name, records))))


def _require_rows(pairs: Pairs) -> Pairs:
    if not len(pairs.values):
        raise DataError(f"{pairs.name}: holds no rows")
    return pairs


def _checked(name: str, records: Iterable[tuple[object, ...]]) -> Iterator[tuple[str, str]]:
    for number, record in enumerate(records, 1):
        if problem := next(filter(None, map(text_problem, record, NAMES)), None):
            raise row_error(name, number, problem)
        source, target = record
        yield str(source), str(target)

"""Rows that cannot be read or lack a column: refused, or passed over up to a number that the user allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from distcore import DataError
from distcore_data.formats.columns import Record, RowError


@dataclass(slots=True)
class BadRows:
    """The bad rows that were passed over."""

    limit: int
    """Most of them."""
    problems: dict[str, None] = field(default_factory=dict)
    """A line for each, with file, row and problem; a row that is read twice is there once."""


_PASSED_OVER: ContextVar[BadRows | None] = ContextVar("_PASSED_OVER", default=None)


@contextmanager
def skipping(limit: int) -> Iterator[BadRows]:
    """Pass over at most ``limit`` bad rows of all sources that are read inside; more raise DataError."""
    passed_over = BadRows(limit)
    token = _PASSED_OVER.set(passed_over)
    try:
        yield passed_over
    finally:
        _PASSED_OVER.reset(token)


def good_rows(rows: Iterable[Record | RowError]) -> Iterator[Record]:
    """Yield the records. Raises the first error, unless it is in ``skipping``, where there is room for it."""
    for row in rows:
        if not isinstance(row, RowError):
            yield row
            continue
        bad = _PASSED_OVER.get()
        if bad is None:
            raise row
        if str(row) not in bad.problems and len(bad.problems) >= bad.limit:
            more = f"; more bad rows than the {bad.limit} of --skip-bad-rows"
            raise DataError(f"{row}{more if bad.limit else ''}")
        bad.problems[str(row)] = None

"""Bad rows: refused, or passed over up to a number that the user allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from distcore import DataError
from distcore_data.formats.columns import CutError, RowError

R = TypeVar("R")


@dataclass(slots=True)
class BadRows:
    """The bad rows that were passed over."""

    limit: int
    """Most of them."""
    problems: dict[str, None] = field(default_factory=dict)
    """A line for each, with file, row and problem; a row that is read twice is there once."""

    def pass_over(self, error: DataError) -> None:
        """Add the error of a bad row, or of all rows from one to the end of a file. Raises it if
        there is no room.
        """
        line = (
            f"{error}; the rest of this file is passed over"
            if isinstance(error, CutError)
            else str(error)
        )
        if line not in self.problems and len(self.problems) >= self.limit:
            more = f"; more bad rows than the {self.limit} of --skip-bad-rows"
            raise DataError(f"{error}{more if self.limit else ''}")
        self.problems[line] = None


_PASSED_OVER: ContextVar[BadRows | None] = ContextVar("_PASSED_OVER", default=None)


@contextmanager
def skipping(limit: int) -> Iterator[BadRows]:
    """Pass over at most ``limit`` bad rows of all sources that are read
    inside; more raise DataError.
    """
    passed_over = BadRows(limit)
    token = _PASSED_OVER.set(passed_over)
    try:
        yield passed_over
    finally:
        _PASSED_OVER.reset(token)


def pass_over(error: DataError) -> None:
    """Pass over a bad row by its error. Raises it outside ``skipping``, and where there is
    no room for it.
    """
    if (bad := _PASSED_OVER.get()) is None:
        raise error
    bad.pass_over(error)


def good_rows(rows: Iterable[R | RowError]) -> Iterator[R]:
    """Yield the records, which may have their numbers with them.

    Raises the first error, unless it is in ``skipping``, where there is room for it, and
    any record is left.
    """
    first, is_empty = None, True
    for row in rows:
        if not isinstance(row, RowError):
            is_empty = False
            yield row
            continue
        pass_over(row)
        first = first or row
    if first and is_empty:
        raise first

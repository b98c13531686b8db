"""Rows made from their values again, to compare them with those that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distcore import DataError
from distcore_tasks.rows.encoding import naming_row
from distcore_tasks.rows.lazy_table import NumberedSource
from distcore_tasks.rows.pipeline import Encoded, Refuse
from distcore_tasks.rows.table import CachedTable, OneRow, joined_table, row_of

TOGETHER = 7
"""Values that are encoded together: few, and no divisor of a chunk of stored rows."""
Origin = Callable[[], tuple[NumberedSource, Callable[[Sequence[Any], Refuse], Encoded]]]
"""Return the values of a dataset by number, and what encodes some of them."""


def rows_anew(origin: Origin, numbers: np.ndarray) -> CachedTable:
    """Return the rows ``numbers``, int64 ``(n,)``, of the values of a dataset.

    Encodes all values up to the last one that is needed, for a value may have several rows.
    """
    rows = list[OneRow]()
    like = CachedTable({})
    for table, more in _encoded_anew(origin):
        like = table
        rows += more
        if len(rows) > int(numbers.max()):
            break
    return joined_table([rows[number] for number in numbers.tolist()], like)


def entries_anew(origin: Origin, entries: int) -> CachedTable:
    """Return the first rows of a dataset, with so many entries together, or all of them."""
    rows = list[OneRow]()
    like = CachedTable({})
    for table, more in _encoded_anew(origin):
        like = table
        rows += more
        entries -= sum(len(next(iter(row.values()))) for row in more)
        if entries <= 0:
            break
    return joined_table(rows, like)


def _encoded_anew(origin: Origin) -> Iterator[tuple[CachedTable, list[OneRow]]]:
    """Yield the rows of all values in order, and a table with their columns.

    Each is encoded with few others, and those in reverse: a row must not depend on either.
    """
    values, encode = origin()
    for first in range(0, len(values), TOGETHER):
        places = list(reversed(range(first, min(first + TOGETHER, len(values)))))

        def refuse(place: int, what: str, places: Sequence[int] = places) -> None:
            raise values.problem(places[place], what)

        def problem(place: int, what: str, places: Sequence[int] = places) -> DataError:
            return values.problem(places[place], what)

        with naming_row(problem):
            encoded = encode(values.at(places), refuse)
        owners = np.arange(len(places)) if encoded.owners is None else encoded.owners
        rows = list[OneRow]()
        for owner in reversed(range(len(places))):
            own = np.flatnonzero(owners == owner).tolist()
            rows += [row_of(encoded.table, row) for row in own]
        yield encoded.table, rows

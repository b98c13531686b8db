"""Rows made from their values again, to compare them with those that are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distcore_tasks.rows.lazy_table import NumberedSource
from distcore_tasks.rows.pipeline import Encoded, Refuse
from distcore_tasks.rows.table import CachedTable, OneRow, joined_table, row_of

TOGETHER = 7
"""Values that are encoded together: few, and no divisor of a chunk of stored rows."""
Origin = Callable[[], tuple[NumberedSource, Callable[[Sequence[Any], Refuse], Encoded]]]
"""Return the values of a dataset by number, and what encodes some of them."""


def rows_anew(origin: Origin, numbers: np.ndarray) -> CachedTable:
    """Return the rows ``numbers``, int64 ``(n,)``, of the values of a dataset.

    Each is encoded with few others, and those in reverse: a row must not depend on either. Encodes
    all values up to the last one that is needed, for a value may have several rows.
    """
    values, encode = origin()
    rows = list[OneRow]()
    like = CachedTable({})
    for first in range(0, len(values), TOGETHER):
        if len(rows) > int(numbers.max()):
            break
        places = list(reversed(range(first, min(first + TOGETHER, len(values)))))

        def refuse(place: int, what: str, places: Sequence[int] = places) -> None:
            raise values.problem(places[place], what)

        encoded = encode(values.at(places), refuse)
        like = encoded.table
        owners = np.arange(len(places)) if encoded.owners is None else encoded.owners
        for owner in reversed(range(len(places))):
            rows += [row_of(like, row) for row in np.flatnonzero(owners == owner).tolist()]
    return joined_table([rows[number] for number in numbers.tolist()], like)

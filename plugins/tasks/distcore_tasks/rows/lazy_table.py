"""Rows that are read and encoded when they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from distcore import DataError
from distcore_data import FetchedAhead, RowOrder
from distcore_tasks.rows.encoding import naming_row
from distcore_tasks.rows.pipeline import Refuse
from distcore_tasks.rows.table import CachedTable, OneRow, Rows, joined_table, row_of
from distcore_tasks.shared.stored_arrays import Entries
from distcore_tasks.shared.streams.values import NumberedValues

KEPT_TOKENS = 2**22
"""Most tokens that a lazy table keeps: a step asks for each row three times, for its length, its
items and its batch.
"""


class NumberedSource(Protocol):
    """Values by number."""

    def __len__(self) -> int:
        """Return the number of values."""
        ...

    def at(self, places: Sequence[int]) -> Sequence[Any]:
        """Return the values at ``places``."""
        ...

    def problem(self, place: int, what: str) -> DataError:
        """Return the error of a value."""
        ...


class LazyTable:
    """Rows of values by number; implements ``Table``.

    A row is a function of its number alone. So a resume, and any number of ranks and workers, have
    the same rows.
    """

    def __init__(
        self,
        values: NumberedSource,
        encode: Callable[[Sequence[Any], Refuse], CachedTable],
        beside: Mapping[str, Entries] | None = None,
    ) -> None:
        """``values``: one for each row. ``encode`` returns one row for each of some values.

        ``beside``: columns that are stored, beside the encoded ones.
        """
        self.values, self._encode, self.beside = values, encode, beside or {}
        self._kept = OrderedDict[int, OneRow]()
        self._kept_tokens = 0
        # Without rows; it says which columns there are.
        self._like = CachedTable({})

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process begin without rows in memory."""
        return type(self), (self.values, self._encode, self.beside)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)

    def take(self, numbers: np.ndarray) -> Rows:
        """Return some rows. Raises DataError with the row in its source."""
        missing = [row for row in np.unique(numbers).tolist() if row not in self._kept]
        if missing:
            self._add(missing)
        rows = [self._kept[row] for row in numbers.tolist()]
        for row in numbers.tolist():
            self._kept.move_to_end(row)
        while self._kept_tokens > KEPT_TOKENS and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_tokens -= _tokens_of(oldest)
        columns = joined_table(rows, self._like).columns
        beside = {name: column[numbers] for name, column in self.beside.items()}
        return CachedTable({**columns, **beside}).all()

    def _add(self, missing: Sequence[int]) -> None:
        """Encode rows, and keep them."""

        def refuse(place: int, what: str) -> None:
            raise self.values.problem(missing[place], what)

        with naming_row(lambda place, what: self.values.problem(missing[place], what)):
            encoded = self._encode(self.values.at(missing), refuse)
        self._like = encoded
        for place, number in enumerate(missing):
            row = row_of(encoded, place)
            self._kept[number] = row
            self._kept_tokens += _tokens_of(row)


class StreamedTable(LazyTable):
    """Rows of a source that is read by number."""

    values: NumberedValues[Any]

    @property
    def name(self) -> str:
        """Name of the source in error messages."""
        return self.values.name

    @property
    def have_room(self) -> bool:
        """True if the cache holds all files that have to be fetched."""
        return self.values.rows.have_room

    def check_room(self) -> None:
        """Raise DataError if remote files are more than the cache holds."""
        self.values.rows.check_room()

    def pieces(self, most: int) -> np.ndarray:
        """Return the bounds of the pieces that ``NumberedValues.pieces`` cuts, int64."""
        return self.values.pieces(most)

    def fetched_ahead(self, order: RowOrder, positions: int) -> RowOrder:
        """Return an order that has remote files fetched before their rows come up.

        It fetches them ``positions`` ahead.
        """
        is_remote = self.values.rows.remote_bytes
        return FetchedAhead(order, self.values.fetch, positions) if is_remote else order


def _tokens_of(row: OneRow) -> int:
    """Return the number of entries of a row, without bytes of texts."""
    return sum(
        entries.size for entries in row.values() if entries.dtype != np.uint8 or entries.ndim > 1
    )

"""Datasets whose rows are encoded when their step comes. A row is a function of its number alone.

So a resume, and any number of ranks and workers, have the same rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore import Column
from distcore_data import FetchedAhead, RowOrder
from distcore_tasks.shared.splits import Refuse
from distcore_tasks.shared.streams.values import AT_ONCE, NumberedValues, spread

if TYPE_CHECKING:
    from torch import Tensor

Encoded = tuple[np.ndarray, ...]
"""Arrays of a row, of which the first has its tokens."""
Encode = Callable[[list[Any], Refuse], Iterable[Encoded]]
"""Encode values, in whose places are others if they are refused and passed over."""
KEPT = 2**22
"""Most tokens that are kept: a step asks for those of its rows three times, for
lengths, items and batches.
"""


class EncodedRows:
    """Encoded rows by number, with those that were asked for last in memory."""

    def __init__(self, values: NumberedValues[Any], encode: Encode) -> None:
        """Read ``values``."""
        self._values, self._encode = values, encode
        self._kept, self._size = OrderedDict[int, Encoded](), 0

    def __reduce__(self) -> tuple[type[EncodedRows], tuple[NumberedValues[Any], Encode]]:
        """Let another process begin without rows in memory."""
        return EncodedRows, (self._values, self._encode)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._values)

    @property
    def name(self) -> str:
        """Name of the source in error messages."""
        return self._values.name

    def number(self, place: int) -> int:
        """Return the number in its source of the row at a place."""
        return self._values.number(place)

    def numbered(self) -> Iterator[tuple[int, Any]]:
        """Yield the number in its source, and the value, of each row."""
        for start in range(0, len(self), AT_ONCE):
            places = np.arange(start, min(start + AT_ONCE, len(self)))
            yield from zip(
                self._values.numbers(places).tolist(), self._values.at(places), strict=True
            )

    def pieces(self, most: int) -> np.ndarray:
        """Return the first row of each piece of a file of at most ``most`` rows, and the end of
        the last one, int64.
        """
        return self._values.pieces(most)

    def bounds(self, sources: Sequence[Path]) -> list[int]:
        """Return the first row of each source of a mixture, and the end of the
        last; empty without sources.
        """
        return self._values.bounds(sources) if sources else []

    def fetched_ahead(self, order: RowOrder, positions: int) -> RowOrder:
        """Return an order that has remote files fetched before their rows come up,
        so many positions ahead.
        """
        remote = self._values.rows.remote_bytes
        return FetchedAhead(order, self._values.fetch, positions) if remote else order

    @property
    def have_room(self) -> bool:
        """True if the cache holds all files that have to be fetched."""
        return self._values.rows.have_room

    def check_room(self) -> None:
        """Raise DataError if remote files are more than the cache holds."""
        self._values.rows.check_room()

    def at(self, rows: np.ndarray) -> list[Encoded]:
        """Return the rows, int64 ``(n,)``. Raises DataError with the row in its source."""
        missing = [row for row in np.unique(rows).tolist() if row not in self._kept]
        values = self._values.at(missing)

        def refuse(place: int, what: str) -> None:
            raise self._values.problem(missing[place], what)

        for row, encoded in zip(missing, self._encode(values, refuse), strict=True):
            self._kept[row], self._size = encoded, self._size + len(encoded[0])
        asked = [self._kept[row] for row in rows.tolist()]
        for row in rows.tolist():
            self._kept.move_to_end(row)
        # of a long document several blocks may be asked for
        while self._size > KEPT and len(self._kept) > 1:
            self._size -= len(self._kept.popitem(last=False)[1][0])
        return asked


@dataclass(frozen=True, eq=False, slots=True)
class EncodedColumn:
    """A number of each row; implements ``distcore.Column``."""

    rows: EncodedRows
    """The rows."""
    number: Callable[[Encoded], int]
    """Return the number of a row."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of ``rows``, both int64 ``(n,)``."""
        return np.fromiter(map(self.number, self.rows.at(rows)), np.int64, len(rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedDataset(ABC):
    """Rows, read and encoded by number; implements ``distcore.Dataset``."""

    rows: EncodedRows
    """The rows."""
    content: str
    """Digest of the source, of which rows are taken, and of what encodes them."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    @property
    def lengths(self) -> Column:
        """Tokens that each row reads."""
        return EncodedColumn(self.rows, self.row_length)

    @property
    def items(self) -> Column:
        """Weight of each row in the mean loss."""
        return EncodedColumn(self.rows, self.row_items)

    @abstractmethod
    def row_length(self, row: Encoded) -> int:
        """Return the tokens that a row reads."""

    @abstractmethod
    def row_items(self, row: Encoded) -> int:
        """Return the weight of a row."""

    @abstractmethod
    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedRows(StreamedDataset):
    """Streamed rows, collated by the class of rows in memory."""

    stored: Callable[[Sequence[Encoded]], Any]
    """Return the dataset of some rows."""

    def row_length(self, row: Encoded) -> int:
        """Return the tokens that a row reads."""
        return int(self.stored([row]).lengths[0])

    def row_items(self, row: Encoded) -> int:
        """Return the weight of a row."""
        return int(self.stored([row]).items[0])

    @property
    def pads(self) -> bool | None:
        """True if rows are always padded; ``None``: as the run says."""
        return getattr(self.stored([]), "pads", None)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as the stored dataset does."""
        batch: dict[str, Tensor] = self.stored(self.rows.at(indices)).batch(np.arange(len(indices)))
        return batch


def mean_lengths(lengths: Column, bounds: Sequence[int]) -> list[float]:
    """Return the mean length of some rows of each source of a mixture, of which
    ``bounds`` are the bounds.
    """
    return [
        float(lengths[spread(first, end)].mean()) if end > first else 1.0
        for first, end in pairwise(bounds)
    ]


def streamed_rows(rows: Any) -> Any:
    """Return what reads the rows of a dataset when their step comes; ``None`` if they are stored.

    It has the members ``name``, ``pieces``, ``fetched_ahead``, ``have_room`` and ``check_room`` of
    ``EncodedRows``.
    """
    return rows.rows if isinstance(rows, StreamedDataset) else getattr(rows, "streamed", None)

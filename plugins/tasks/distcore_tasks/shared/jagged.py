"""Rows of unequal length as one flat array in a memory-mapped file, which ranks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from distcore_tasks.shared.arrays import ArrayFile, digest_arrays, map_array

IGNORED = -100
"""Label of a position without a target."""
CONTENT = "content.sha256"
"""File with the digest of a dataset's rows."""


class Jagged(ABC):
    """Rows of unequal length: each is a part of one array."""

    __slots__ = ()
    values: np.ndarray
    """Tokens or other numbers, int32, or bytes, uint8, shape ``(entries,)``."""

    @property
    @abstractmethod
    def starts(self) -> np.ndarray:
        """Start of each row in ``values``, int64, shape ``(rows,)``."""

    @property
    @abstractmethod
    def ends(self) -> np.ndarray:
        """End of each row in ``values``, int64, shape ``(rows,)``."""

    @property
    def lengths(self) -> np.ndarray:
        """Entries of each row, int64, shape ``(rows,)``."""
        lengths: np.ndarray = self.ends - self.starts
        return lengths

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.starts)

    def row(self, number: int) -> np.ndarray:
        """Return the entries of one row."""
        return self.values[self.starts[number] : self.ends[number]]

    def padded(
        self, rows: np.ndarray, fill: int, *, left: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows ``rows``, int64 ``(n,)``, as a table ``(n, longest)``, and its mask.

        The bool mask is False at padding, which is ``fill``, after the entries of a row or, with
        ``left``, before them. Entries keep their dtype.
        """
        starts = self.starts[rows][:, None]
        lengths = self.ends[rows][:, None] - starts
        longest = lengths.max(initial=0)
        # Number in its row of the entry at each place; negative before a row that is padded left.
        numbers = np.arange(longest)
        if left:
            numbers = numbers - (longest - lengths)
        mask = (numbers >= 0) & (numbers < lengths)
        # This reads past the ends of shorter rows, into their neighbors; the mask then
        # replaces those entries.
        entries = self.values.take(starts + numbers, mode="clip")
        padding = self.values.dtype.type(fill)
        return np.where(mask, entries, padding), mask


@dataclass(frozen=True, eq=False, slots=True)
class Flat(Jagged):
    """Entries of all rows, concatenated."""

    values: np.ndarray
    """The entries."""
    offsets: np.ndarray
    """Start of each row, and the end of the last one, int64, shape ``(rows + 1,)``."""

    @property
    def starts(self) -> np.ndarray:
        """Start of each row."""
        return self.offsets[:-1]

    @property
    def ends(self) -> np.ndarray:
        """End of each row."""
        return self.offsets[1:]


@dataclass(frozen=True, eq=False, slots=True)
class Spans(Jagged):
    """Rows that may share entries."""

    values: np.ndarray
    """The entries of all rows, and perhaps others."""
    starts: np.ndarray
    """Start of each row."""
    ends: np.ndarray
    """End of each row."""


def flat_of(values: np.ndarray, lengths: np.ndarray) -> Flat:
    """Return rows from their concatenated entries and the ``lengths`` of each, ``(rows,)``."""
    return Flat(values, np.cumsum([0, *lengths], dtype=np.int64))


def flat_rows(rows: Sequence[Sequence[int] | np.ndarray]) -> Flat:
    """Return rows of numbers, as int32."""
    arrays = [np.asarray(row, np.int32) for row in rows]
    # The empty array is for no rows: ``concatenate`` refuses an empty list.
    values = np.concatenate([np.empty(0, np.int32), *arrays])
    return flat_of(values, np.fromiter(map(len, rows), np.int64, len(rows)))


class FlatFile:
    """A ``Flat`` on disk, written in chunks of rows; a context manager that closes its files."""

    def __init__(self, folder: Path, name: str, dtype: DTypeLike) -> None:
        """Create the two files of ``name`` in ``folder``; the entries are ``dtype``."""
        self._values = ArrayFile(folder / f"{name}.npy", dtype)
        self._offsets = ArrayFile(folder / f"{name}_offsets.npy", np.int64)
        self._offsets.add(np.zeros(1, np.int64))

    def __enter__(self) -> FlatFile:
        """Return the file."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close both files."""
        self._values.__exit__(*error)
        self._offsets.__exit__(*error)

    def add(self, rows: Flat) -> None:
        """Append rows."""
        self._offsets.add(rows.offsets[1:] + self._values.count)
        self._values.add(rows.values)


def open_flat(folder: Path, name: str) -> Flat:
    """Map the files of ``FlatFile`` into memory."""
    return Flat(map_array(folder / f"{name}.npy"), map_array(folder / f"{name}_offsets.npy"))


def flat_digest(*flats: Flat) -> str:
    """Return the SHA-256 over all entries and offsets, in hexadecimal; every machine's is equal."""
    arrays = [array for flat in flats for array in (flat.values, flat.offsets)]
    return digest_arrays(*arrays, widen=True)


def write_content(folder: Path, digest: str) -> None:
    """Write the digest of a dataset's rows to their folder."""
    (folder / CONTENT).write_text(digest, encoding="ascii")


def read_content(folder: Path) -> str:
    """Return the digest that ``write_content`` wrote."""
    return (folder / CONTENT).read_text(encoding="ascii")

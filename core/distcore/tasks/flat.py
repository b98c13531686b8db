"""Rows of unlike lengths as one flat array on disk, memory-mapped: all ranks of a machine share one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

IGNORED = -100
"""Label of a place without a target."""


@dataclass(frozen=True, eq=False, slots=True)
class Flat:
    """Entries of all rows, one row after the other."""

    values: np.ndarray
    """Tokens or other numbers, int32, or bytes, uint8, shape ``(entries,)``."""
    offsets: np.ndarray
    """Where each row starts, and at last where the last one ends, int64, shape ``(rows + 1,)``."""

    @property
    def lengths(self) -> np.ndarray:
        """Entries of each row, int64, shape ``(rows,)``."""
        found: np.ndarray = np.diff(self.offsets)
        return found

    def row(self, number: int) -> np.ndarray:
        """Return the entries of one row."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    def add_to(self, digest: Any) -> None:
        """Add all entries, and which row they are in, to a digest of hashlib."""
        for column in (self.values, self.offsets):
            digest.update(np.ascontiguousarray(column, dtype="<i8").data)  # the same bytes on every machine

    def padded(self, rows: np.ndarray, fill: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows ``rows``, int64 ``(n,)``, as ``(n, longest)`` with ``fill`` behind them, and what is theirs.

        The entries keep their dtype; the second array is a mask, bool, of the same shape.
        """
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        columns = np.arange(lengths.max(initial=0))
        mask = columns < lengths[:, None]
        # Beside a shorter row this reads entries of its neighbours; the mask then replaces them.
        found = self.values.take(starts[:, None] + columns, mode="clip")
        return np.where(mask, found, self.values.dtype.type(fill)), mask


def flat_rows(rows: Sequence[Sequence[int] | np.ndarray]) -> Flat:
    """Return rows of numbers, as int32."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Flat(np.concatenate([np.empty(0, np.int32), *(np.asarray(row, np.int32) for row in rows)]), offsets)


def write_flat(folder: Path, name: str, flat: Flat) -> None:
    """Write the two arrays into the folder."""
    np.save(folder / f"{name}.npy", flat.values)
    np.save(folder / f"{name}_offsets.npy", flat.offsets)


def open_flat(folder: Path, name: str) -> Flat:
    """Map what ``write_flat`` wrote into memory."""
    # As plain arrays: indexing numpy's memmap class is several times slower.
    values, offsets = (
        np.asarray(np.load(folder / f"{file}.npy", mmap_mode="r", allow_pickle=False))
        for file in (name, f"{name}_offsets")
    )
    return Flat(values, offsets)

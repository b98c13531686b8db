"""Rows of unequal length as one flat array in a memory-mapped file, which all ranks
of a machine share.
"""

from __future__ import annotations

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


@dataclass(frozen=True, eq=False, slots=True)
class Flat:
    """Entries of all rows, concatenated."""

    values: np.ndarray
    """Tokens or other numbers, int32, or bytes, uint8, shape ``(entries,)``."""
    offsets: np.ndarray
    """Start of each row, and the end of the last one, int64, shape ``(rows + 1,)``."""

    @property
    def lengths(self) -> np.ndarray:
        """Entries of each row, int64, shape ``(rows,)``."""
        lengths: np.ndarray = np.diff(self.offsets)
        return lengths

    def row(self, number: int) -> np.ndarray:
        """Return the entries of one row."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    def padded(
        self, rows: np.ndarray, fill: int, *, left: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows ``rows``, int64 ``(n,)``, as a table ``(n, longest)``, and a bool mask
        of the same shape.

        The mask is False at padding, which is ``fill``, after the entries of a row or, with
        ``left``, before them. Entries keep their dtype.
        """
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        longest = lengths.max(initial=0)
        places = np.arange(longest) - ((longest - lengths)[:, None] if left else 0)
        mask = (places >= 0) & (places < lengths[:, None])
        # This reads past the ends of shorter rows, into their neighbors; the mask then
        # replaces those entries.
        entries = self.values.take(starts[:, None] + places, mode="clip")
        return np.where(mask, entries, self.values.dtype.type(fill)), mask


def flat_of(values: np.ndarray, lengths: np.ndarray) -> Flat:
    """Return rows with the concatenated entries ``values``. ``lengths``:
    entries of each row, ``(rows,)``.
    """
    return Flat(values, np.cumsum([0, *lengths], dtype=np.int64))


def flat_rows(rows: Sequence[Sequence[int] | np.ndarray]) -> Flat:
    """Return rows of numbers, as int32."""
    values = np.concatenate([np.empty(0, np.int32), *(np.asarray(row, np.int32) for row in rows)])
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


def write_flat(folder: Path, name: str, flat: Flat) -> None:
    """Write the two arrays into the folder."""
    with FlatFile(folder, name, flat.values.dtype) as file:
        file.add(flat)


def open_flat(folder: Path, name: str) -> Flat:
    """Map the files of ``write_flat`` or ``FlatFile`` into memory."""
    return Flat(map_array(folder / f"{name}.npy"), map_array(folder / f"{name}_offsets.npy"))


def flat_digest(*flats: Flat) -> str:
    """Return the SHA-256 over all entries and row lengths, in hexadecimal; the
    same on every machine.
    """
    return digest_arrays(
        *(column for flat in flats for column in (flat.values, flat.offsets)), widen=True
    )


def write_content(folder: Path, digest: str) -> None:
    """Write the digest of a dataset's rows to their folder."""
    (folder / CONTENT).write_text(digest, encoding="ascii")


def read_content(folder: Path) -> str:
    """Return the digest that ``write_content`` wrote."""
    return (folder / CONTENT).read_text(encoding="ascii")

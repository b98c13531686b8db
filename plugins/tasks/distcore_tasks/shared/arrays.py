"""Arrays on disk: written in parts, read through a memory map."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import DTypeLike

from distcore_tasks.shared.stored_arrays import Entries

BLOCK = 2**18
"""Entries of an array that are looked at in one go."""


class ArrayFile:
    """A new ``.npy`` file that is longer than memory; a context manager, which closes it."""

    def __init__(self, path: Path, dtype: DTypeLike, entry: tuple[int, ...] = ()) -> None:
        """Create the file at ``path``. ``add`` converts to ``dtype``. ``entry``: shape of one."""
        self._dtype, self._entry = np.dtype(dtype), entry
        self._file = path.open("wb")
        self.count = 0
        self._write_header()

    def __enter__(self) -> ArrayFile:
        """Return the file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the number of entries, for which numpy leaves room in the header,
        and close the file.
        """
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def add(self, entries: np.ndarray) -> None:
        """Append entries, shape ``(n, …)``."""
        self._file.write(np.ascontiguousarray(entries, self._dtype).data)
        self.count += len(entries)

    def _write_header(self) -> None:
        shape = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.count, *self._entry),
        }
        np.lib.format.write_array_header_1_0(self._file, shape)


def map_array(path: Path) -> np.ndarray:
    """Map a ``.npy`` file into memory, to be read."""
    # As a plain array: indexing numpy's memmap class is several times slower.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def count_numbers(numbers: Entries, least: int = 0) -> np.ndarray:
    """Return how often each number from 0 on is there, int64, for ``least`` of them or more."""
    counts = np.zeros(least, np.int64)
    for block in array_blocks(numbers):
        more = np.bincount(block, minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts


def array_blocks(array: Entries) -> Iterator[np.ndarray]:
    """Yield an array in parts of at most ``BLOCK`` entries of its first dimension."""
    return (array[start : start + BLOCK] for start in range(0, len(array), BLOCK))


def digest_arrays(*arrays: Entries, widen: bool = False) -> str:
    """Return the SHA-256 over all entries, little-endian: the same on every machine.

    ``widen``: integers count as int64 and floats as float32, whatever their dtype.
    """
    digest = hashlib.sha256()
    for array in arrays:
        kind = np.dtype(
            ("f4" if array.dtype.kind == "f" else "i8") if widen else array.dtype
        ).newbyteorder("<")
        for block in array_blocks(array):
            digest.update(np.ascontiguousarray(block, kind).data)
    return digest.hexdigest()

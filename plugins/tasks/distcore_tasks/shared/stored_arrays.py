"""Arrays in files of which entries are read when they are asked for.

A mapped array takes the memory of each page that was touched, in the end that of the whole
file; these take none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Protocol

import numpy as np

from distcore import DataError
from distcore_data import ChosenRows, cache_root

NEAR = 16
"""Entries per one that is asked for, up to which all between the first and the last are
read in one go.
"""


class Entries(Protocol):
    """An array in memory, or one of which any part is: ``array[rows]``, ``array[first:end]``."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the entries."""
        ...

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        ...

    def __len__(self) -> int:
        """Return the number of entries."""
        ...

    def __getitem__(self, rows: slice | np.ndarray, /) -> np.ndarray:
        """Return entries: those of a slice, or of numbers, int64 ``(n,)``."""
        ...


class Nameless:
    """An unlinked temporary file on the disk of the cache, freed with this object."""

    def __init__(self) -> None:
        """Create the file. Raises OSError."""
        cache_root().mkdir(parents=True, exist_ok=True)
        self.file: IO[bytes] = TemporaryFile(dir=cache_root())  # noqa: SIM115  # closed below

    def __del__(self) -> None:
        """Close the file."""
        if hasattr(self, "file"):
            self.file.close()


@dataclass(frozen=True, eq=False, slots=True)
class StoredArray:
    """An array in a file; implements ``Entries``."""

    file: Path | Nameless
    """The file; one without a name is for one process."""
    start: int
    """Its byte with the first entry."""
    dtype: np.dtype[Any]
    """Type of the entries."""
    shape: tuple[int, ...]
    """Shape of the array in the file."""
    chosen: ChosenRows | None = None
    """The entries that are meant, in their order; ``None``: all."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        """Return the number of entries."""
        return self.shape[0] if self.chosen is None else len(self.chosen)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return entries: those of a slice, or of numbers, int64 ``(n,)``."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        numbers = rows if self.chosen is None else self.chosen[rows]
        first, end = (int(numbers.min()), int(numbers.max()) + 1) if len(numbers) else (0, 0)
        with self._opened() as file:
            if end - first <= NEAR * len(numbers):
                return self._read(file, first, end)[numbers - first]
            return np.concatenate([self._read(file, row, row + 1) for row in numbers.tolist()])

    def only(self, rows: ChosenRows) -> StoredArray:
        """Return the entries of some of these rows."""
        inner = self.chosen
        chosen = (
            rows
            if inner is None
            else ChosenRows.from_blocks(self.shape[0], (inner[some] for some in rows.blocks()))
        )
        return replace(self, chosen=chosen)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the file anew: processes that are forked share the place in an open one."""
        if isinstance(self.file, Path):
            with self.file.open("rb") as file:
                yield file
        else:
            yield self.file.file

    def _read(self, file: Any, first: int, end: int) -> np.ndarray:
        size = self.dtype.itemsize * prod(self.shape[1:])
        file.seek(self.start + first * size)
        content = bytearray(file.read((end - first) * size))
        return np.frombuffer(content, self.dtype).reshape(-1, *self.shape[1:])


def open_array(path: Path) -> StoredArray:
    """Open a ``.npy`` file."""
    head = np.load(path, mmap_mode="r", allow_pickle=False)
    return StoredArray(path, head.offset, head.dtype, head.shape)


def stored(blocks: Iterable[np.ndarray]) -> StoredArray:
    """Return ``blocks`` one after the other, in a file without a name. Raises DataError if
    it cannot be written.
    """
    first, rows = np.empty(0, np.uint8), 0
    try:
        nameless = Nameless()
        for block in blocks:
            first, rows = block[:0], rows + len(block)
            nameless.file.write(np.ascontiguousarray(block).data)
        nameless.file.flush()
    except OSError as error:
        hint = "set DISTCORE_CACHE to a folder that can be written"
        raise DataError(f"cache folder {cache_root()}: {error.strerror or error}; {hint}") from None
    return StoredArray(nameless, 0, first.dtype, (rows, *first.shape[1:]))

"""Values of rows that need not fit into memory: a source is read once, and each later
iteration reads a copy.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from tempfile import TemporaryFile
from typing import IO, Any, Generic, Protocol, TypeVar

from distcore import DataError
from distcore_data import Filtered, IndexedRows, Source, cache_root, data_format

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
WRITTEN = 64
"""Values that are written at a time."""


class Values(Protocol[T_co]):
    """A sized iterable with one value per row. A list is one; others need not hold
    all values in memory.
    """

    def __len__(self) -> int:
        """Return the number of values."""
        ...

    def __iter__(self) -> Iterator[T_co]:
        """Yield the values in order; the same ones each time."""
        ...


@dataclass(frozen=True, slots=True)
class LazyValues(Generic[T]):
    """Values that each iteration reads again; implements ``Values``."""

    read: Callable[[], Iterator[T]]
    """Read all values, from the first."""
    rows: int
    """Number of values."""

    def __len__(self) -> int:
        """Return the number of values."""
        return self.rows

    def __iter__(self) -> Iterator[T]:
        """Yield the values in order."""
        return self.read()


class CopiedValues(Generic[T]):
    """A copy of values in a file without a name, on the disk of the cache; implements
    ``Values`` if it is whole.
    """

    def __init__(self, values: Iterable[T]) -> None:
        """Copy ``values``; go through all of them even if the disk is full, or one is
        nothing that JSON has.
        """
        self._ends, self._rows, self.is_whole = [0], 0, True
        self._file: IO[bytes] | None = None
        some: list[T] = []
        for value in values:
            some.append(value)
            if len(some) == WRITTEN:
                self._write(some)
                some = []
        self._write(some)

    def __del__(self) -> None:
        """Let the disk have its room back."""
        if self._file:
            self._file.close()

    def _write(self, values: list[T]) -> None:
        self._rows += len(values)
        try:
            text = json.dumps([[isinstance(value, tuple), value] for value in values]).encode()
            self.is_whole = self.is_whole and _values(text) == values
            if self._file is None:
                cache_root().mkdir(parents=True, exist_ok=True)
                # it is read as long as there is the copy
                self._file = TemporaryFile(dir=cache_root())  # noqa: SIM115
            self._file.write(text)
            self._ends.append(self._file.tell())
        except (OSError, TypeError, ValueError):
            self.is_whole = False

    def __len__(self) -> int:
        """Return the number of values."""
        return self._rows

    def __iter__(self) -> Iterator[T]:
        """Yield the values in order; several may iterate at once."""
        assert self._file
        for start, end in pairwise(self._ends):
            self._file.seek(start)
            yield from _values(self._file.read(end - start))


def _values(text: bytes) -> list[Any]:
    return [tuple(value) if is_tuple else value for is_tuple, value in json.loads(text)]


class RowNumbers:
    """Numbers in their source of the rows that have values, ascending: memory for each
    gap between them alone.
    """

    def __init__(self) -> None:
        """Begin without values."""
        self._places, self._numbers = array("q", [0]), array("q", [0])
        self._count, self._next = 0, 0

    def add(self, number: int) -> None:
        """Add the number of the next value's row."""
        if number != self._next:
            self._places.append(self._count)
            self._numbers.append(number)
        self._count, self._next = self._count + 1, number + 1

    def __getitem__(self, place: int) -> int:
        """Return the number of the row of a value."""
        gap = bisect_right(self._places, place) - 1
        return self._numbers[gap] + place - self._places[gap]


@dataclass(frozen=True, slots=True)
class ReadValues(Generic[T]):
    """Values that were read from a source; implements ``Values``."""

    values: Values[T]
    """The values."""
    source: Source
    """The source."""
    numbers: RowNumbers
    """The row of each in the source."""

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.values)

    def __iter__(self) -> Iterator[T]:
        """Yield the values in order."""
        return iter(self.values)

    def number(self, place: int) -> int:
        """Return the number in the source of the value at a place."""
        return self.numbers[place]

    def problem(self, place: int, what: str) -> DataError:
        """Return the error of a value, with file and row."""
        source = self.source.source if isinstance(self.source, Filtered) else self.source
        return IndexedRows(source, {}, whole=False).problem(self.numbers[place], what)


def read_values(
    source: Source,
    read: Callable[[], Iterator[tuple[int, T]]],
    see: Callable[[T], None] = lambda value: None,
) -> ReadValues[T]:
    """Return all values that ``read`` yields with their rows. Reads each once, so that
    bad rows raise here.

    ``see`` takes each. Keeps only values of a ``.json`` file in memory, because its parser reads
    the whole file. Where others cannot be copied, each iteration reads the source.
    """
    numbers = RowNumbers()

    def seen() -> Iterator[T]:
        for number, value in read():
            numbers.add(number)
            see(value)
            yield value

    if data_format(source) == ".json":
        return ReadValues(list(seen()), source, numbers)
    copy = CopiedValues(seen())
    again = LazyValues(lambda: (value for _, value in read()), len(copy))
    return ReadValues(copy if copy.is_whole else again, source, numbers)

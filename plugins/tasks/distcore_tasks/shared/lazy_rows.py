"""Values of rows that are read again from the source in each iteration, so that they need not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Generic, Protocol, TypeVar

import numpy as np

from distcore_data import Source, data_format

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Values(Protocol[T_co]):
    """A sized iterable with one value per row. A list is one; others need not hold all values in memory."""

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


def picked(values: Values[T], numbers: np.ndarray) -> LazyValues[T]:
    """Return the ``values`` at ``numbers``, int64, ascending, from 0."""
    chosen = np.zeros(len(values), np.uint8)
    chosen[numbers] = 1
    return LazyValues(lambda: compress(values, chosen.tobytes()), len(numbers))


def read_values(
    source: Source, read: Callable[[], Iterator[T]], see: Callable[[T], None] = lambda value: None
) -> Values[T]:
    """Return all values that ``read`` yields. Reads every value once, so that bad rows raise here; ``see`` takes each.

    Keeps only values of a ``.json`` file in memory, because its parser reads the whole file.
    """

    def seen() -> Iterator[T]:
        for value in read():
            see(value)
            yield value

    if data_format(source) == ".json":
        return list(seen())
    return LazyValues(read, sum(1 for _ in seen()))

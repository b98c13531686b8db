"""Values of rows that are read from their source again instead of being kept, so that they need not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Generic, Protocol, TypeVar

import numpy as np

from distcore.data import Source, data_format

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Values(Protocol[T_co]):
    """As many values as there are rows; a list is one. Only what is iterated over need be in memory."""

    def __len__(self) -> int:
        """Return the number of values."""
        ...

    def __iter__(self) -> Iterator[T_co]:
        """Yield the values in order, each time the same ones."""
        ...


@dataclass(frozen=True, slots=True)
class Reread(Generic[T]):
    """Values that each iteration reads anew; implements ``Values``."""

    read: Callable[[], Iterator[T]]
    """Reads them from the first on."""
    rows: int
    """Their number."""

    def __len__(self) -> int:
        """Return the number of values."""
        return self.rows

    def __iter__(self) -> Iterator[T]:
        """Yield the values in order."""
        return self.read()


def picked(values: Values[T], numbers: np.ndarray) -> Reread[T]:
    """Return those of ``values`` that ``numbers`` names, int64, ascending, from 0."""
    chosen = np.zeros(len(values), np.uint8)
    chosen[numbers] = 1
    return Reread(lambda: compress(values, chosen.tobytes()), len(numbers))


def kept(source: Source, read: Callable[[], Iterator[T]]) -> Values[T]:
    """Return all values that ``read`` yields, each of which is read once here, for what is wrong with it to be found.

    Only those of a ``.json`` file, which is parsed as a whole, are kept in memory.
    """
    if data_format(source) == ".json":
        return list(read())
    return Reread(read, sum(1 for _ in read()))

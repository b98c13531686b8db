"""The columns of a dataset, lengths and items: arrays, or read a few rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from distcore.errors import TaskError
from distcore.plugin.batching.permutation import order_kind


class Column(Protocol):
    """One integer per row. ``np.ndarray`` and ``np.memmap`` are columns.

    Of any other class the core reads only the rows that a step needs, or a window: it need
    not fit into memory.
    """

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray:
        """Return the values of ``rows``, int64 ``(n,)``, in this order: integers, ``(n,)``."""


@dataclass(frozen=True, slots=True)
class ConstantColumn:
    """A column with one value for all rows, which takes no memory; implements ``Column``."""

    rows: int
    """Number of rows."""
    value: int
    """Value of every row."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.rows

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray:
        """Return the value once for each of ``rows``, int64, shape ``(n,)``."""
        return np.full(rows.shape, self.value, dtype=np.int64)


def is_windowed(column: Column) -> bool:
    """Return True for a column that must not be read as a whole: very long, or no array."""
    is_array = isinstance(column, np.ndarray | ConstantColumn)
    return not is_array or order_kind(len(column)) == "feistel"


def read(column: Column, rows: np.ndarray) -> np.ndarray:
    """Return the values of ``rows``; raises TaskError if they are not as many."""
    values: np.ndarray[Any, Any] = np.asarray(column[rows])
    if values.shape != rows.shape:
        raise TaskError(
            f"dataset: its column {type(column).__name__} returned values of shape {values.shape}"
            f" for rows of shape {rows.shape}; return one integer per row, in the order asked for"
        )
    return values


def whole(column: Column) -> np.ndarray:
    """Return every value of a column that is not windowed, shape ``(rows,)``."""
    return column if isinstance(column, np.ndarray) else column[np.arange(len(column))]


def common_value(column: Column) -> int | None:
    """Return the value of every row; ``None`` if values differ, or too many would be read."""
    if isinstance(column, ConstantColumn):
        return column.value
    if is_windowed(column) or not len(column):
        return None
    values = whole(column)
    first = values[0]
    return int(first) if (values == first).all() else None

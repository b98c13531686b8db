"""A number of each row of a table, such as its length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distcore import Column
from distcore_tasks.rows.table import CachedTable, Rows, Table

Number = Callable[[Rows], np.ndarray]
"""Return a number of each of some rows, int64 ``(n,)``."""


@dataclass(frozen=True, eq=False, slots=True)
class LazyColumn:
    """A number of each row, computed when it is asked for; implements ``distcore.Column``."""

    table: Table
    """The table."""
    number: Number
    """Return the number of each of some rows."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.table)

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of some rows, both int64 ``(n,)``."""
        if not len(numbers):
            return np.empty(0, np.int64)
        return np.asarray(self.number(self.table.take(numbers)), np.int64)


def column_of(table: Table, number: Number) -> Column:
    """Return a number of each row: an array, unless rows are encoded when they are asked for."""
    if not isinstance(table, CachedTable):
        return LazyColumn(table, number)
    if not len(table):
        return np.empty(0, np.int64)
    return np.asarray(number(table.all()), np.int64)

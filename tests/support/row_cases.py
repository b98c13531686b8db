"""Rows of the datasets of tasks, whatever holds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from distcore_tasks.rows.dataset import RowDataset
from distcore_tasks.rows.table import CachedTable
from distcore_tasks.shared.streams.datasets import streamed_rows


def row_of(dataset: Any, column: str, number: int | np.integer[Any]) -> np.ndarray:
    """The entries of a stored row in a column, such as ``tokens``."""
    if isinstance(dataset, RowDataset):
        assert isinstance(dataset.table, CachedTable)
        return dataset.table.jagged(column).row(int(number))
    jagged = getattr(dataset, column) if hasattr(dataset, column) else dataset.texts[column]
    row: np.ndarray = jagged.row(int(number))
    return row


def all_of(dataset: Any, column: str) -> np.ndarray:
    """The entries of all rows in a column, one after the other."""
    return np.concatenate([row_of(dataset, column, number) for number in range(len(dataset))])


def is_streamed(dataset: Any) -> bool:
    """True for rows that are read and encoded when their step comes."""
    return streamed_rows(dataset) is not None

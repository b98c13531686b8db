"""Data sets as parts of what a task has read: rows to train on, rows to evaluate on, and rows to test on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from distcore import DataError
from distcore.data import row_error
from distcore_tasks.shared.lazy_rows import Values, picked
from distcore_tasks.shared.options import TaskOptions


class Rows(Protocol):
    """Rows in file order."""

    @property
    def name(self) -> str:
        """What error messages call these rows, such as ``data file chats.jsonl``."""
        ...

    @property
    def values(self) -> Values[Any]:
        """One value per row."""
        ...


R = TypeVar("R", bound=Rows)


@dataclass(frozen=True, slots=True)
class Part(Generic[R]):
    """Some rows of a source: those of one data set."""

    rows: R
    """All rows of the source."""
    numbers: np.ndarray
    """Which of them, int64, ascending, from 0."""

    def values(self) -> Values[Any]:
        """Return the values of this part's rows, in order."""
        return picked(self.rows.values, self.numbers)

    def problem(self, place: int, what: str) -> DataError:
        """Return the error for the row at ``place`` of this part."""
        return row_error(self.rows.name, int(self.numbers[place]) + 1, what)


def parts_of(options: TaskOptions, read: Callable[[str], R], seed: int) -> dict[str, Part[R]]:
    """Return the data sets by name. Without ``test_data`` there is no ``test``: the evaluation rows serve as test.

    ``read`` returns the rows of a source. Raises DataError.
    """
    rows = read(options.data)
    if options.eval_data is None:
        parts = dict(zip(("train", "evaluation"), _split(rows, options.eval_fraction, seed), strict=True))
    else:
        parts = {"train": _whole(rows), "evaluation": _whole(read(options.eval_data))}
    if options.test_data is not None:
        parts["test"] = _whole(read(options.test_data))
    return parts


def _whole(rows: R) -> Part[R]:
    return Part(rows, np.arange(len(rows.values)))


def _split(rows: R, fraction: float, seed: int) -> Iterator[Part[R]]:
    """Yield the rows to train on and those to evaluate on, which depend on seed and number of rows alone."""
    count = len(rows.values)
    if count < 2:
        raise DataError(f"{rows.name}: holds one row, so none is left for evaluation; give --eval-data a file")
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(count)
    evaluated = min(max(1, round(fraction * count)), count - 1)
    yield Part(rows, np.sort(order[evaluated:]))
    yield Part(rows, np.sort(order[:evaluated]))

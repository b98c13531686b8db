"""Split rows into training, evaluation and test datasets."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from distcore import DataError
from distcore_data import pass_over
from distcore_tasks.shared.lazy_rows import Values, picked
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.sources import naming


class SourceRows(Protocol):
    """Rows in file order."""

    @property
    def name(self) -> str:
        """Name of these rows in error messages, such as ``data file chats.jsonl``."""
        ...

    @property
    def values(self) -> Values[Any]:
        """One value per row."""
        ...

    def problem(self, place: int, what: str) -> DataError:
        """Return the error of the row at a place."""
        ...


R = TypeVar("R", bound=SourceRows)
T = TypeVar("T")
Refuse = Callable[[int, str], None]
"""Take the place of a value, and what is wrong with it. Raises DataError, or returns if the row is passed over."""


@dataclass(frozen=True, slots=True)
class Part(Generic[R]):
    """The rows of one dataset, which are some rows of a source."""

    rows: R
    """All rows of the source."""
    numbers: np.ndarray
    """Numbers of this part's rows, int64, ascending, from 0."""

    def values(self) -> Values[Any]:
        """Return the values of this part's rows, in order."""
        return picked(self.rows.values, self.numbers)

    def problem(self, place: int, what: str) -> DataError:
        """Return the error for the row at ``place`` of this part."""
        return self.rows.problem(int(self.numbers[place]), what)

    def refuse(self, place: int, what: str) -> None:
        """Raise the error for the row at ``place`` of this part."""
        raise self.problem(place, what)

    def encoded(self, folder: Path, encode: Callable[[Part[R], Refuse], T]) -> tuple[Part[R], T]:
        """Return the rows that ``encode`` does not refuse, and what it makes of them, with the new ``folder``.

        Those that it refuses are bad rows. If they are passed over, it is called again, without them.
        """
        refused = dict[int, DataError]()

        def refuse(place: int, what: str) -> None:
            refused[place] = self.problem(place, what)
            pass_over(refused[place])

        made = encode(self, refuse)
        if not refused:
            return self, made
        if len(refused) == len(self.numbers):
            raise next(iter(refused.values()))
        shutil.rmtree(folder, ignore_errors=True)
        left = Part(self.rows, np.delete(self.numbers, [*refused]))
        return left, encode(left, left.refuse)


def read_parts(options: TaskOptions, read: Callable[[str], R], seed: int) -> dict[str, Part[R]]:
    """Read all sources, and return the datasets by name. Raises DataError.

    ``read`` returns the rows of a source. Without ``test_data`` there is no ``test``, and the evaluation rows serve as
    test rows.
    """
    rows = read(options.data)
    if options.eval_data is None:
        parts = dict(zip(("train", "evaluation"), _split(rows, options.eval_fraction, seed), strict=True))
    else:
        parts = {"train": _whole(rows)}
    return parts | read_held_out(options, read)


def read_held_out(options: TaskOptions, read: Callable[[str], R]) -> dict[str, Part[R]]:
    """Read the sources beside ``data``, and return their datasets by name. Raises DataError."""
    parts: dict[str, Part[R]] = {}
    for name, source in options.held_out.items():
        with naming(name):
            parts[name] = _whole(read(source))
    return parts


def _whole(rows: R) -> Part[R]:
    return Part(rows, np.arange(len(rows.values)))


def _split(rows: R, fraction: float, seed: int) -> Iterator[Part[R]]:
    """Yield training and evaluation rows. They depend on the seed and the number of rows only."""
    for numbers in split_rows(rows.name, len(rows.values), fraction, seed):
        yield Part(rows, numbers)


def split_rows(
    name: str, rows: int, fraction: float, seed: int, classes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers into training and evaluation: two ascending int64 arrays.

    They depend on ``seed``, the number of ``rows`` and their class numbers, int64 ``(rows,)``, only. Evaluation gets
    about ``fraction`` of the rows, and at least one. Training keeps at least one row, or one of each class. Raises
    DataError for too few rows; the message starts with ``name``.
    """
    if rows < 2:
        raise DataError(f"{name}: holds one row, so none is left for evaluation; give --eval-data a file")
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(rows)
    # Training keeps the last row in this random order or, with classes, the first row of each.
    kept = [rows - 1] if classes is None else np.unique(classes[order], return_index=True)[1]
    free = np.delete(order, kept)
    if not len(free):
        problem = f"each of the {rows} rows is the only one of its class, so none is left for evaluation"
        raise DataError(f"{name}: {problem}; give --eval-data a file")
    evaluated = np.zeros(rows, dtype=bool)
    evaluated[free[: max(1, round(fraction * rows))]] = True
    return np.flatnonzero(~evaluated), np.flatnonzero(evaluated)

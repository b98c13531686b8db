"""Split rows into training, evaluation and test datasets."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from distcore import DataError
from distcore.plugin.batching import Feistel
from distcore_data import pass_over
from distcore_tasks.shared.arrays import BLOCK, array_blocks
from distcore_tasks.shared.lazy_rows import Values, picked
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.sources import naming
from distcore_tasks.shared.stored_arrays import Entries


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


DRAWN = 2**22
"""Most rows whose split is drawn; the evaluation rows of more are computed."""
R = TypeVar("R", bound=SourceRows)
T = TypeVar("T")
Refuse = Callable[[int, str], None]
"""Take the place of a value, and what is wrong with it. Raises DataError, or returns if the
row is passed over.
"""


@dataclass(frozen=True, slots=True)
class Part(Generic[R]):
    """A subset of a source: train, evaluation or test."""

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
        """Return the rows that ``encode`` does not refuse, and what it makes of them,
        with the new ``folder``.

        Those that it refuses are bad rows. If they are passed over, it is
        called again, without them.
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

    ``read`` returns the rows of a source. Without ``test_data`` there is no ``test``, and the
    evaluation rows serve as test rows.
    """
    rows = read(options.data)
    if options.eval_data is None:
        parts = dict(
            zip(("train", "evaluation"), _split(rows, options.eval_fraction, seed), strict=True)
        )
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
    name: str, rows: int, fraction: float, seed: int, classes: Entries | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers into training and evaluation: two ascending int64 arrays.

    They depend on ``seed``, the number of ``rows`` and their class numbers, int64 ``(rows,)``,
    only. Evaluation gets about ``fraction`` of the rows, and at least one. Training keeps at least
    one row, or one of each class. Raises DataError for too few rows; the message starts with
    ``name``.
    """
    evaluated = _drawn(name, rows, fraction, seed, classes)
    return np.flatnonzero(~evaluated), np.flatnonzero(evaluated)


def evaluation_rows(
    name: str, rows: int, fraction: float, seed: int, classes: Entries | None = None
) -> np.ndarray:
    """Return the evaluation rows of ``split_rows`` or, of very many, the first
    ones of a computed order.

    Training then keeps the first row of each class of the source. Memory is for these rows alone.
    """
    if rows <= DRAWN:
        return np.flatnonzero(_drawn(name, rows, fraction, seed, classes))
    order, evaluation = Feistel(rows, seed, 0), np.empty(max(1, round(fraction * rows)), np.int64)
    for start in range(0, len(evaluation), BLOCK):
        end = min(start + BLOCK, len(evaluation))
        evaluation[start:end] = order.rows_at(start, end)
    evaluation.sort()
    if classes is not None:
        kept = _first_of_each(array_blocks(classes))
        places = np.searchsorted(evaluation, kept).clip(max=len(evaluation) - 1)
        evaluation = np.delete(evaluation, places[evaluation[places] == kept])
    if not len(evaluation):
        raise _none_left(name, rows)
    return evaluation


def without(rows: int, numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the numbers below ``rows`` that are not among ``numbers``, both ascending int64, some
    of them at a time.
    """
    for start in range(0, rows, BLOCK):
        end = min(start + BLOCK, rows)
        first, last = np.searchsorted(numbers, [start, end])
        yield np.delete(np.arange(start, end), numbers[first:last] - start)


def _drawn(name: str, rows: int, fraction: float, seed: int, classes: Entries | None) -> np.ndarray:
    """Return True for each evaluation row, ``(rows,)``."""
    if rows < 2:
        raise DataError(
            f"{name}: holds one row, so none is left for evaluation; give --eval-data a file"
        )
    order = np.arange(rows, dtype=np.min_scalar_type(rows))
    np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).shuffle(order)
    # Training keeps the last row in this random order or, with classes, the first row of each.
    kept: np.ndarray = np.array([rows - 1])
    if classes is not None:
        few = classes[:]
        kept = _first_of_each(few[block] for block in array_blocks(order))
    if len(kept) == rows:
        raise _none_left(name, rows)
    count = max(1, round(fraction * rows))
    first = order[: count + len(kept)]
    evaluated = np.zeros(rows, dtype=bool)
    evaluated[np.delete(first, kept[kept < len(first)])[:count]] = True
    return evaluated


def _first_of_each(classes: Iterable[np.ndarray]) -> np.ndarray:
    """Return the place of the first row of each class, int64, ascending."""
    seen, firsts, start = np.zeros(1, bool), list[int](), 0
    for block in classes:
        seen = np.append(seen, np.zeros(max(0, int(block.max()) + 1 - len(seen)), bool))
        places = np.flatnonzero(~seen[block])
        if len(places):
            _, new = np.unique(block[places], return_index=True)
            firsts += (places[new] + start).tolist()
            seen[block] = True
        start += len(block)
    return np.sort(np.array(firsts, np.int64))


def _none_left(name: str, rows: int) -> DataError:
    problem = (
        f"each of the {rows} rows is the only one of its class, so none is left for evaluation"
    )
    return DataError(f"{name}: {problem}; give --eval-data a file")

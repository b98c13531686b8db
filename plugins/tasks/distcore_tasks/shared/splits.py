"""Split rows into training, evaluation and test datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from distcore import DataError
from distcore.plugin.batching import Feistel
from distcore_tasks.shared.arrays import BLOCK, array_blocks
from distcore_tasks.shared.stored_arrays import Entries

DRAWN = 2**22
"""Most rows whose split is drawn; the evaluation rows of more are computed."""
Refuse = Callable[[int, str], None]
"""Take the place of a value, and what is wrong with it. Raises DataError, or returns if the
row is passed over.
"""


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

"""The classes of a data set, and the split of its rows into training and evaluation."""

from __future__ import annotations

import numpy as np

from distcore.data.files import row_error
from distcore.errors import DataError, nearest
from distcore.tasks.text_classification.data.labelled import Rows


def distinct_labels(rows: Rows) -> list[int] | list[str]:
    """Return the distinct labels, sorted: class ``i`` is the ``i``-th of them.

    Raises DataError if there are fewer than two.
    """
    labels: list[int] | list[str] = sorted(set(rows.labels))  # type: ignore[type-var, assignment]
    if len(labels) < 2:
        problem = f"all {len(rows)} rows have the label {labels[0]!r}: a classifier needs at least 2 classes"
        raise DataError(f"{rows.name}: {problem}")
    return labels


def encode_labels(rows: Rows, classes: list[str]) -> np.ndarray:
    """Return the class number of each row, int64 ``(rows,)``; raises DataError for a label that is not a class."""
    numbers = {name: number for number, name in enumerate(classes)}
    for row, label in enumerate(rows.labels, 1):
        if str(label) not in numbers:
            known = ", ".join(classes[:20]) + (", …" if len(classes) > 20 else "")
            hint = f"{nearest(str(label), classes)}; training has: {known}"
            raise row_error(rows.name, row, f"label {label!r} is out of range: no training row has it{hint}")
    return np.asarray([numbers[str(label)] for label in rows.labels], dtype=np.int64)


def split_rows(name: str, labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers into training and evaluation: two ascending int64 arrays that depend on seed and labels alone.

    ``labels``: the class number of each row. ``fraction``: the part of the rows that evaluation should get; it gets at
    least one, and at least one row of every class stays in training. Raises DataError if there are too few rows for
    both; ``name`` opens the message.
    """
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(len(labels))
    # The first row of each class in this random order stays in training.
    _, firsts = np.unique(labels[order], return_index=True)
    free = np.delete(order, firsts)
    wanted = max(1, round(fraction * len(labels)))
    if not len(free):
        problem = f"each of the {len(labels)} rows is the only one of its class, so none is left for evaluation"
        raise DataError(f"{name}: {problem}; give --eval-data a file")
    evaluated = np.zeros(len(labels), dtype=bool)
    evaluated[free[:wanted]] = True
    return np.flatnonzero(~evaluated), np.flatnonzero(evaluated)

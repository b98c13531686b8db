"""Classes, and which rows are kept from training for evaluation."""

from __future__ import annotations

import numpy as np

from distcore.errors import DataError, nearest
from distcore.tasks.text_classification.data.files import Rows, row_error


def distinct_labels(rows: Rows) -> list[int] | list[str]:
    """Return the sorted distinct labels, which number the classes. At least two, or DataError."""
    labels: list[int] | list[str] = sorted(set(rows.labels))  # type: ignore[type-var, assignment]
    if len(labels) < 2:
        problem = f"all {len(rows)} rows have the label {labels[0]!r}: a classifier needs at least 2 classes"
        raise DataError(f"{rows.name}: {problem}")
    return labels


def encode_labels(rows: Rows, classes: list[str]) -> np.ndarray:
    """Return the class number of each row, int64; a label that is no class is a DataError with its row."""
    numbers = {name: number for number, name in enumerate(classes)}
    for row, label in enumerate(rows.labels, 1):
        if str(label) not in numbers:
            known = ", ".join(classes[:20]) + (", …" if len(classes) > 20 else "")
            hint = f"{nearest(str(label), classes)}; training has: {known}"
            raise row_error(rows.name, row, f"label {label!r} is out of range: no training row has it{hint}")
    return np.asarray([numbers[str(label)] for label in rows.labels], dtype=np.int64)


def split_rows(name: str, labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows for training and for evaluation, each ascending, from seed and labels alone.

    At least one row is kept for evaluation, and every class stays in training. Raises DataError if there are too
    few rows for both.
    """
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(len(labels))
    # The first row of each class, in random order, stays in training.
    _, firsts = np.unique(labels[order], return_index=True)
    free = np.delete(order, firsts)
    wanted = max(1, round(fraction * len(labels)))
    if not len(free):
        problem = f"each of the {len(labels)} rows is the only one of its class, so none is left for evaluation"
        raise DataError(f"{name}: {problem}; give --eval-data a file")
    kept = np.zeros(len(labels), dtype=bool)
    kept[free[:wanted]] = True
    return np.flatnonzero(~kept), np.flatnonzero(kept)

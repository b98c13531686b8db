"""Data that differ from epoch to epoch, and their random numbers."""

from __future__ import annotations

import numpy as np

from distcore.errors import TaskError
from distcore.plugin.batching.columns import is_windowed, whole
from distcore.plugin.task.task import Dataset


def row_random(seed: int, epoch: int, row: int) -> np.random.Generator:
    """Return random numbers for one row in one epoch: the same ones for the same three numbers.

    Each of these is at least 0.

    For datasets that vary: with these, a row is masked or augmented in the same way whichever rank
    or loader process collates it, and again after a resume.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, row))
    return np.random.Generator(np.random.PCG64(sequence))


def in_epoch(dataset: Dataset, epoch: int) -> Dataset:
    """Return the dataset of this epoch; ``dataset`` itself unless it varies.

    Raises TaskError if the number of rows or their lengths change: the order of
    rows depends on both.
    """
    # With torch, which the random numbers do not need.
    from distcore.plugin.task.datasets import at_epoch, varies

    if not varies(dataset):
        return dataset
    rows = at_epoch(dataset, epoch)
    if not hasattr(rows, "batch"):
        raise TaskError(f"dataset: at({epoch}) returned {type(rows).__name__}; expected a dataset")
    if len(rows) != len(dataset):
        raise TaskError(
            f"dataset: at({epoch}) has {len(rows)} rows, not {len(dataset)}; their number may not"
            " vary"
        )
    if rows.lengths is dataset.lengths or is_windowed(dataset.lengths):
        return rows
    mine, others = whole(dataset.lengths), whole(rows.lengths)
    odd = np.flatnonzero(mine != others)
    if odd.size:
        row = int(odd[0])
        raise TaskError(
            f"dataset: at({epoch}) says that row {row} has length {others[row]}, not {mine[row]};"
            " lengths may not vary"
        )
    return rows

"""Look up the optional members of a dataset, listed in ``DatasetSpec``. No other module does so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from distcore.config import RunConfig
from distcore.errors import TaskError
from distcore.plugin.batching.columns import Column, read
from distcore.plugin.task.ragged import Ragged
from distcore.plugin.task.task import Batch, Dataset

BLOCK = 2**20
"""Rows whose losses are added up together."""


def varies(dataset: Dataset) -> bool:
    """Return True if the rows differ from epoch to epoch."""
    return hasattr(dataset, "at")


def at_epoch(dataset: Dataset, epoch: int) -> Dataset:
    """Return the rows as they are in ``epoch``; ``dataset`` itself unless it varies."""
    return dataset.at(epoch) if hasattr(dataset, "at") else dataset


def order_of(dataset: Dataset) -> Callable[[int, int], Column] | None:
    """Return the order of the rows by seed and epoch, if the dataset has one of its own."""
    order: Callable[[int, int], Column] | None = getattr(dataset, "row_order", None)
    return order


def content_of(dataset: Dataset) -> str | None:
    """Return the digest of the rows' content; ``None`` for a dataset without one."""
    content: str | None = getattr(dataset, "content", None)
    return content


def row_bytes_of(dataset: Dataset) -> Iterator[bytes] | None:
    """Return the bytes of each row, if ``content`` is a digest of samples; ``None`` for others."""
    rows: Iterator[bytes] | None = dataset.row_bytes() if hasattr(dataset, "row_bytes") else None
    return rows


def made_anew(dataset: Dataset, indices: np.ndarray) -> Batch | None:
    """Return the batch of some rows, made from their source again; ``None`` if nobody says how."""
    batch: Batch | None = dataset.made_anew(indices) if hasattr(dataset, "made_anew") else None
    return batch


def counts_of(dataset: Dataset) -> Mapping[str, Column]:
    """Return the weights of rows in the means of further loss terms, by the terms' names."""
    counts: Mapping[str, Column] = getattr(dataset, "counts", {})
    return counts


def own_padding(dataset: Dataset) -> bool | None:
    """Return True if ``batch`` pads rows; ``None`` if the dataset leaves it to the model."""
    own_pads: bool | None = getattr(dataset, "pads", None)
    return own_pads


def pads(dataset: Dataset, config: RunConfig) -> bool:
    """Return True if ``config`` pads the rows of a micro-batch to the longest one."""
    own_pads = own_padding(dataset)
    return config.pads_rows if own_pads is None else own_pads


def padded_rows(dataset: Dataset) -> Dataset | None:
    """Return the same rows, padded; ``None`` if they are not the same then."""
    same: Dataset | None = dataset.padded() if hasattr(dataset, "padded") else dataset
    return same


def check_indexed(name: str, dataset: object) -> None:
    """Raise TaskError unless rows can be fetched by number, and some trained on.

    ``name`` is a field of ``Datasets``.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__len__"):
        raise TaskError(
            f"task: prepare() returned as {name!r} a {type(dataset).__name__}, which is read from"
            " its start only: a resume could not go on inside it (law 7); expected a dataset with"
            " len() and batch(indices)"
        )
    if not hasattr(type(dataset), "batch"):
        raise TaskError(
            f"task: prepare() returned as {name!r} a {type(dataset).__name__}, which has no"
            " batch(indices)"
        )
    if name == "train" and isinstance(dataset, Sized) and not len(dataset):
        raise TaskError("task: its training set has no rows, so there is nothing to train on")


def mean_loss(outputs: dict[str, Tensor | Ragged], dataset: Dataset) -> float | None:
    """Return the mean over items, as in training; ``None`` where nothing counts."""
    starts = range(0, len(dataset), BLOCK)
    items = 0
    for start in starts:
        rows = np.arange(start, min(start + BLOCK, len(dataset)))
        items += int(read(dataset.items, rows).sum())
    loss = outputs.get("loss")
    if not isinstance(loss, Tensor) or not items:
        return None
    total = 0.0
    for start in starts:
        total += loss[start : start + BLOCK].double().sum().item()
    return total / items

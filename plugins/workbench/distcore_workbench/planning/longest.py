"""The micro-batch of a job that needs most memory: known from the lengths of its rows, before
any is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distcore import Batch as Values
from distcore import ConfigError, Dataset, RunConfig
from distcore.plugin.batching import in_epoch, is_windowed, read, training_plan, whole
from distcore.resolve.padding_free import rows_as_computed

SAMPLED = 2**20
"""Most rows whose lengths are read where a column must not be read as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The longest micro-batch that the data allow."""

    rows: int
    """How many rows it has."""
    longest: int
    """The length of its longest row, to which the others are padded."""
    of_step: int
    """How many micro-batches a rank may have in a step, at most."""


def longest(config: RunConfig, dataset: Dataset, shards: int) -> tuple[Batch, Values]:
    """Return the longest micro-batch of a resolved config, and its rows collated;
    raises ConfigError without rows.

    Rows are padded unless the config says otherwise: for 'auto', only a run decides, by measuring.
    """
    rows_of = rows_as_computed(config, dataset)
    if not len(rows_of):
        raise ConfigError("the data have no rows to train on")
    rows = longest_rows(config, rows_of, shards)
    mine = -(-config.global_batch_size // shards)
    size = int(read(rows_of.lengths, rows).max())
    # cut by tokens, others may have fewer rows
    fewest = 1 if config.micro_batch_tokens is not None else len(rows)
    of_step = 1 if len(rows) >= mine else -(-mine // fewest)
    return Batch(rows=len(rows), longest=size, of_step=of_step), in_epoch(rows_of, 0).batch(rows)


def longest_rows(config: RunConfig, dataset: Dataset, shards: int) -> np.ndarray:
    """Return the rows of the micro-batch with most padded tokens, and of those the
    longest rows; int64, ``(n,)``.

    No shuffle gives a larger one: it is made of rows that follow each other in order of
    length. ``config`` is resolved.
    """
    plan = training_plan(config, dataset)
    mine = -(-plan.global_batch // shards)
    lengths, rows = _descending(dataset)
    cut = plan.by_tokens
    if cut is None:
        return rows[: min(mine, plan.micro_batch)]
    if not cut.pads:
        taken = max(1, int(np.searchsorted(np.cumsum(lengths), cut.tokens, side="right")))
        return rows[: min(taken, mine, cut.most(int(lengths[0])))]
    # A micro-batch begins with its longest row: of rows of one length only the first one counts.
    firsts = np.unique(lengths, return_index=True)[1][::-1]
    counts = np.array([min(cut.fit(int(lengths[at])), mine, len(rows) - at) for at in firsts])
    best = int((counts * lengths[firsts]).argmax())
    return rows[firsts[best] : firsts[best] + counts[best]]


def _descending(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths, the longest first, and the rows that have them; of a column too long to
    read, of some rows.
    """
    column, count = dataset.lengths, len(dataset)
    if is_windowed(column) and count > SAMPLED:
        rows = np.linspace(0, count - 1, SAMPLED).astype(np.int64)
        lengths = read(column, rows)
    else:
        rows = np.arange(count)
        lengths = whole(column) if not is_windowed(column) else read(column, rows)
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    return lengths[order], rows[order]

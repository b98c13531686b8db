"""Find the micro-batch of a job that needs most memory, from the lengths of its rows."""

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
    """Return the longest micro-batch of a resolved config, and its rows collated.

    Raises ConfigError if the data have no rows. Rows are padded unless the config says otherwise:
    for 'auto', only a run decides, by measuring.
    """
    rows_of = rows_as_computed(config, dataset)
    if not len(rows_of):
        raise ConfigError("the data have no rows to train on")
    rows = longest_rows(config, rows_of, shards)
    length = int(read(rows_of.lengths, rows).max())
    rows_per_shard = -(-config.global_batch_size // shards)
    if len(rows) >= rows_per_shard:
        micro_batches = 1
    else:
        # Cut by tokens, the other micro-batches of a step may have fewer rows than this one.
        fewest_rows = 1 if config.micro_batch_tokens is not None else len(rows)
        micro_batches = -(-rows_per_shard // fewest_rows)
    batch = Batch(rows=len(rows), longest=length, of_step=micro_batches)
    return batch, in_epoch(rows_of, 0).batch(rows)


def longest_rows(config: RunConfig, dataset: Dataset, shards: int) -> np.ndarray:
    """Return the rows of the micro-batch with most padded tokens, int64, ``(n,)``.

    Where several have as many, they are those with the longest rows. No shuffle gives a larger
    one: it is made of rows that follow each other in order of length. ``config`` is resolved.
    """
    plan = training_plan(config, dataset)
    rows_per_shard = -(-plan.global_batch // shards)
    lengths, rows = _descending(dataset)
    cut = plan.by_tokens
    if cut is None:
        return rows[: min(rows_per_shard, plan.micro_batch)]
    if not cut.pads:
        rows_within_bound = int(np.searchsorted(np.cumsum(lengths), cut.tokens, side="right"))
        # A row longer than the bound is a micro-batch of its own.
        rows_within_bound = max(1, rows_within_bound)
        return rows[: min(rows_within_bound, rows_per_shard, cut.most(int(lengths[0])))]
    # A micro-batch begins with its longest row: of rows of one length only the first one counts.
    _, ascending_starts = np.unique(lengths, return_index=True)
    starts = ascending_starts[::-1]
    sizes = []
    for start in starts:
        rows_that_fit = cut.fit(int(lengths[start]))
        sizes.append(min(rows_that_fit, rows_per_shard, len(rows) - start))
    fullest = int((np.array(sizes) * lengths[starts]).argmax())
    start = starts[fullest]
    return rows[start : start + sizes[fullest]]


def _descending(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths, the longest first, and the rows that have them, both ``(n,)``.

    Of a column too long to read, these are ``SAMPLED`` rows, evenly spaced.
    """
    column = dataset.lengths
    count = len(dataset)
    if not is_windowed(column):
        rows = np.arange(count)
        lengths = whole(column)
    elif count <= SAMPLED:
        rows = np.arange(count)
        lengths = read(column, rows)
    else:
        rows = np.linspace(0, count - 1, SAMPLED).astype(np.int64)
        lengths = read(column, rows)
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    return lengths[order], rows[order]

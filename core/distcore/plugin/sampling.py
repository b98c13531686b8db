"""Which rows form a global batch, and how they are split among ranks (laws 1, 2 and 4).

The rows of a global batch depend on seed, epoch and step only. The gradient is a sum over these rows, so the split may
depend on their lengths and on the number of ranks without changing the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from distcore.config import RunConfig
from distcore.plugin.columns import Column, is_windowed, read, whole
from distcore.plugin.contract import MicroBatch, Run, Sampler
from distcore.plugin.permutation import computed_rows, order_kind
from distcore.plugin.task import Dataset

GROUP = 64
"""Most data shards whose rows are sorted by length together, so that a rank need not sort those of all others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """The global batches of every epoch over a dataset."""

    lengths: Column
    """Length of each row of the dataset in tokens."""
    global_batch: int
    """Rows per optimizer step, over all ranks."""
    micro_batch: int
    """Most rows per forward pass on one rank."""
    seed: int
    """Seed of the row order; the same rows come in another order in each epoch."""
    order: Literal["shuffled", "window", "longest-first", "sequential"] = "shuffled"
    """``shuffled``: random. ``window``: random, then grouped by length inside windows. ``longest-first``: by length.

    ``sequential``: as in the dataset.
    """
    window: int = 50
    """Size of a window in global batches; only for ``order="window"``."""

    @property
    def steps(self) -> int:
        """Global batches per epoch; the last one may have fewer rows."""
        return -(-len(self.lengths) // self.global_batch)

    def size(self, step: int) -> int:
        """Return how many rows a step has; asks for none of them."""
        return min(self.global_batch, len(self.lengths) - step * self.global_batch)

    def rows(self, epoch: int, step: int) -> np.ndarray:
        """Return the rows of one global batch, int64, shape ``(global_batch,)`` or, at the end of an epoch, shorter."""
        start = step * self.global_batch
        return _rows_at(self, epoch, start, start + self.size(step))

    def split(self, epoch: int, step: int, shard: int, shards: int) -> list[MicroBatch]:
        """Return the micro-batches of data shard ``shard`` out of ``shards``, for one step.

        A data shard is a rank, or a group of model-parallel ranks that see the same rows. Every shard gets the same
        number of micro-batches, and every row is in exactly one.

        Rows are sorted by length and cut into equal slices. A micro-batch is one slice, so it needs little padding;
        in each turn the shards take adjacent slices, so they finish at nearly the same time. More than ``GROUP``
        shards form groups, and each group does so with its own part of the global batch.
        """
        start, size = step * self.global_batch, self.size(step)
        turns = -(-size // (self.micro_batch * shards))
        group = _group_of(shard, shards)
        rows = _rows_at(self, epoch, start + group.start * size // shards, start + group.stop * size // shards)
        count = turns * len(group)
        if count == 1:
            return [MicroBatch(rows)]
        rows = rows[np.argsort(read(self.lengths, rows), kind="stable")]  # stable: ties have the same order everywhere
        micros = []
        for turn in range(turns):
            position = turn * len(group) + _turn_position(turn, shard - group.start, len(group))
            mine = rows[position * len(rows) // count : (position + 1) * len(rows) // count]
            is_padding = not len(mine)  # where a step has fewer rows than slices: one row pads it
            if is_padding:
                mine = rows[:1] if len(rows) else _rows_at(self, epoch, start, start + 1)
            micros.append(MicroBatch(mine, is_padding=is_padding, last=turn == turns - 1))
        return micros

    @cached_property
    def _longest_first(self) -> np.ndarray:
        return np.argsort(-whole(self.lengths), kind="stable")


def rank_sampler(plan: BatchPlan, shard: int, shards: int) -> Sampler:
    """Return the sampler of data shard ``shard`` out of ``shards``: rank and world size if each rank is a shard."""
    return lambda epoch, step: plan.split(epoch, step, shard, shards)


def training_plan(config: RunConfig, dataset: Dataset) -> BatchPlan:
    """Return the plan of a training run, as a resolved config asks for it."""
    return BatchPlan(
        lengths=dataset.lengths,
        global_batch=config.global_batch_size,
        micro_batch=_resolved(config.micro_batch_size),
        seed=config.seed,
        order="window" if config.loader.length_grouping == "window" else "shuffled",
        window=config.loader.window,
    )


def evaluation_plan(run: Run, dataset: Dataset) -> BatchPlan:
    """Return the plan of an evaluation: every row once, the longest first.

    So a micro-batch that does not fit into memory fails at the start. Where the lengths cannot be read as a whole, rows
    come in the order of the dataset.
    """
    micro_batch = _resolved(run.config.micro_batch_size)
    return BatchPlan(
        lengths=dataset.lengths,
        global_batch=micro_batch * run.world.shards,
        micro_batch=micro_batch,
        seed=0,
        order="sequential" if is_windowed(dataset.lengths) else "longest-first",
    )


def _group_of(shard: int, shards: int) -> range:
    """Return the shards of the group to which ``shard`` belongs: of at most ``GROUP``, and as even as can be."""
    if shards <= GROUP:
        return range(shards)
    groups = -(-shards // GROUP)
    group = shard * groups // shards
    return range(-(-group * shards // groups), -(-(group + 1) * shards // groups))


def _turn_position(turn: int, shard: int, shards: int) -> int:
    """Return which slice of a turn ``shard`` takes; every other turn is reversed, so that work is even."""
    return shard if turn % 2 == 0 else shards - 1 - shard


def _rows_at(plan: BatchPlan, epoch: int, start: int, stop: int) -> np.ndarray:
    """Return the rows at these positions of the epoch's order, all of one global batch; int64."""
    match plan.order:
        case "sequential":
            return np.arange(start, stop)
        case "longest-first":
            return plan._longest_first[start:stop]
        case "window":  # a window is a whole number of global batches
            number, offset = divmod(start, plan.window * plan.global_batch)
            return _window(plan, epoch, number)[offset : offset + stop - start]
        case "shuffled":
            return _shuffled(plan, epoch, start, stop)


def _shuffled(plan: BatchPlan, epoch: int, start: int, stop: int) -> np.ndarray:
    if order_kind(len(plan.lengths)) == "permutation":
        return _stored(plan, epoch)[0][start:stop]
    return computed_rows(len(plan.lengths), plan.seed, epoch, start, stop)


@lru_cache(maxsize=1)  # asked for in every step; training goes through one epoch after another
def _stored(plan: BatchPlan, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return all rows in random order, int64, shape ``(rows,)``, and a random order of each window's batches."""
    rows = len(plan.lengths)
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([plan.seed, epoch])))
    order = random.permutation(rows)
    batches = range(rows // plan.global_batch if plan.order == "window" else 0)
    return order, [random.permutation(len(batches[at : at + plan.window])) for at in batches[:: plan.window]]


@lru_cache(maxsize=2)  # a loader that works ahead may be in the next window already
def _window(plan: BatchPlan, epoch: int, number: int) -> np.ndarray:
    """Return a window: sorted by length, cut into global batches, and these ordered in random pairs.

    A pair is the k-th shortest batch and the k-th longest, one after the other. Were the batches in a random order, a
    few steps in a row would often see only short rows or only long ones, and the optimizer's momentum would follow
    them. Rows at the end that do not fill a global batch keep their random order.
    """
    size = plan.window * plan.global_batch
    window = _shuffled(plan, epoch, number * size, min((number + 1) * size, len(plan.lengths)))
    count = len(window) // plan.global_batch
    if not count:
        return window
    whole_batches, ragged = np.split(window, [count * plan.global_batch])
    batches = whole_batches[np.argsort(read(plan.lengths, whole_batches), kind="stable")].reshape(count, -1)
    drawn = _drawn(plan, epoch, number, count)
    # A dict keeps the order and drops repeats: each pair comes up twice, and the middle batch is its own partner.
    pairs = dict.fromkeys(np.stack([drawn, count - 1 - drawn], axis=1).reshape(-1).tolist())
    return np.concatenate([batches[list(pairs)].reshape(-1), ragged])


def _drawn(plan: BatchPlan, epoch: int, number: int, count: int) -> np.ndarray:
    """Return the random order of the ``count`` batches of a window, int64, shape ``(count,)``."""
    if order_kind(len(plan.lengths)) == "permutation":
        return _stored(plan, epoch)[1][number]
    seed = np.random.SeedSequence([plan.seed, epoch], spawn_key=(number,))
    return np.random.Generator(np.random.PCG64(seed)).permutation(count)


def _resolved(size: int | str) -> int:
    assert isinstance(size, int)  # 'auto' was resolved before any rank started
    return size

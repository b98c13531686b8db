"""Which rows form a global batch, and how they are split among ranks (laws 1, 2 and 4).

The rows of a global batch depend on seed, epoch and step only. The gradient is a sum over these rows, so the split may
depend on their lengths and on the number of ranks without changing the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from distcore.config import RunConfig
from distcore.plugin.contract import MicroBatch, Run, Sampler
from distcore.plugin.task import Dataset


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """The global batches of every epoch over a dataset."""

    lengths: np.ndarray
    """Length of each row of the dataset in tokens, int, shape ``(rows,)``."""
    global_batch: int
    """Rows per optimizer step, over all ranks."""
    micro_batch: int
    """Most rows per forward pass on one rank."""
    seed: int
    """Seed of the row order; the same rows come in another order in each epoch."""
    order: Literal["shuffled", "window", "longest-first"] = "shuffled"
    """``shuffled``: random. ``window``: random, then grouped by length inside windows. ``longest-first``: by length."""
    window: int = 50
    """Size of a window in global batches; only for ``order="window"``."""

    @property
    def steps(self) -> int:
        """Global batches per epoch; the last one may have fewer rows."""
        return -(-len(self.lengths) // self.global_batch)

    def rows(self, epoch: int, step: int) -> np.ndarray:
        """Return the rows of one global batch, int64, shape ``(global_batch,)`` or, at the end of an epoch, shorter."""
        start = step * self.global_batch
        return _epoch_order(self, epoch)[start : start + self.global_batch]

    def split(self, epoch: int, step: int, shard: int, shards: int) -> list[MicroBatch]:
        """Return the micro-batches of data shard ``shard`` out of ``shards``, for one step.

        A data shard is a rank, or a group of model-parallel ranks that see the same rows. Every shard gets the same
        number of micro-batches, and every row is in exactly one.

        Rows are sorted by length and cut into equal slices. A micro-batch is one slice, so it needs little padding;
        in each turn the shards take adjacent slices, so they finish at nearly the same time.
        """
        rows = self.rows(epoch, step)
        turns = -(-len(rows) // (self.micro_batch * shards))
        count = turns * shards
        if count == 1:
            return [MicroBatch(rows)]
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]  # stable: ties have the same order everywhere
        micros = []
        for turn in range(turns):
            position = turn * shards + _turn_position(turn, shard, shards)
            mine = rows[position * len(rows) // count : (position + 1) * len(rows) // count]
            # A slice is empty where a step has fewer rows than slices: one row pads it.
            micros.append(MicroBatch(mine if len(mine) else rows[:1], is_padding=not len(mine), last=turn == turns - 1))
        return micros


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

    So a micro-batch that does not fit into memory fails at the start.
    """
    micro_batch = _resolved(run.config.micro_batch_size)
    return BatchPlan(
        lengths=dataset.lengths,
        global_batch=micro_batch * run.world.shards,
        micro_batch=micro_batch,
        seed=0,
        order="longest-first",
    )


def _turn_position(turn: int, shard: int, shards: int) -> int:
    """Return which slice of a turn ``shard`` takes; every other turn is reversed, so that work is even."""
    return shard if turn % 2 == 0 else shards - 1 - shard


@lru_cache(maxsize=4)  # asked for in every step, for training and evaluation in turn
def _epoch_order(plan: BatchPlan, epoch: int) -> np.ndarray:
    """Return all rows in the order of this epoch, int64, shape ``(rows,)``."""
    rows = len(plan.lengths)
    if plan.order == "longest-first":
        return np.argsort(-plan.lengths, kind="stable")
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([plan.seed, epoch])))
    order = random.permutation(rows)
    if plan.order == "window":
        return _sort_in_windows(order, plan, random)
    return order


def _sort_in_windows(order: np.ndarray, plan: BatchPlan, random: np.random.Generator) -> np.ndarray:
    """Sort each window by length, cut it into global batches, and order those in random pairs.

    A pair is the k-th shortest batch and the k-th longest, one after the other. Were the batches in a random order, a
    few steps in a row would often see only short rows or only long ones, and the optimizer's momentum would follow
    them. Rows at the end that do not fill a global batch keep their random order.
    """
    result = []
    for start in range(0, len(order), plan.window * plan.global_batch):
        window = order[start : start + plan.window * plan.global_batch]
        count = len(window) // plan.global_batch
        whole, ragged = window[: count * plan.global_batch], window[count * plan.global_batch :]
        batches = whole[np.argsort(plan.lengths[whole], kind="stable")].reshape(count, plan.global_batch)
        drawn = random.permutation(count)
        # A dict keeps the order and drops repeats: each pair comes up twice, and the middle batch is its own partner.
        pairs = dict.fromkeys(np.stack([drawn, count - 1 - drawn], axis=1).reshape(-1).tolist())
        result += [batches[list(pairs)].reshape(-1), ragged]
    return np.concatenate(result) if result else order


def _resolved(size: int | str) -> int:
    assert isinstance(size, int)  # 'auto' was resolved before any rank started
    return size

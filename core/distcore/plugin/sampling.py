"""Which rows make a global batch, and how they are dealt to ranks (laws 1, 2 and 4).

A global batch is a function of seed, epoch and step alone. Dealing happens inside it, so it can look at lengths
and at the number of ranks without touching the mathematics.
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
    """The global batches of every epoch over ``len(lengths)`` rows."""

    lengths: np.ndarray
    """Tokens of each row, shape ``(rows,)``."""
    global_batch: int
    micro_batch: int
    seed: int
    order: Literal["shuffled", "window", "longest-first"] = "shuffled"
    """``window``: shuffled, then matched by length inside windows. ``longest-first``: for evaluation."""
    window: int = 50
    """Global batches in a window."""

    @property
    def steps(self) -> int:
        """Global batches of an epoch; the last may be ragged."""
        return -(-len(self.lengths) // self.global_batch)

    def rows(self, epoch: int, step: int) -> np.ndarray:
        """Rows of one global batch, int64, shape ``(global_batch,)`` or less at the ragged end."""
        start = step * self.global_batch
        return _epoch_order(self, epoch)[start : start + self.global_batch]

    def split(self, epoch: int, step: int, shard: int, shards: int) -> list[MicroBatch]:
        """MicroBatch-batches of ``shard`` out of ``shards``: as many for every shard, each row in exactly one.

        Rows are sorted by length and cut into neighbours, so that a micro-batch needs little padding; the pieces
        that run at the same time on all shards are neighbours too, so that no rank waits for another.
        """
        rows = self.rows(epoch, step)
        turns = -(-len(rows) // (self.micro_batch * shards))
        count = turns * shards
        if count == 1:
            return [MicroBatch(rows)]
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        micros = []
        for turn in range(turns):
            piece = turn * shards + _seat(turn, shard, shards)
            mine = rows[piece * len(rows) // count : (piece + 1) * len(rows) // count]
            micros.append(MicroBatch(mine if len(mine) else rows[:1], is_padding=not len(mine), last=turn == turns - 1))
        return micros


def rank_sampler(plan: BatchPlan, shard: int, shards: int) -> Sampler:
    """Return the sampler of one shard; a strategy with model-parallel ranks passes its data-parallel shard."""
    return lambda epoch, step: plan.split(epoch, step, shard, shards)


def training_plan(config: RunConfig, dataset: Dataset) -> BatchPlan:
    """The plan of a training run."""
    return BatchPlan(
        lengths=dataset.lengths,
        global_batch=config.global_batch_size,
        micro_batch=_as_int(config.micro_batch_size),
        seed=config.seed,
        order="window" if config.loader.length_grouping == "window" else "shuffled",
        window=config.loader.window,
    )


def evaluation_plan(run: Run, dataset: Dataset) -> BatchPlan:
    """The plan of an evaluation: every row once, the longest first, so that memory peaks at the start."""
    micro_batch = _as_int(run.config.micro_batch_size)
    return BatchPlan(
        lengths=dataset.lengths,
        global_batch=micro_batch * run.world.shards,
        micro_batch=micro_batch,
        seed=0,
        order="longest-first",
    )


def _seat(turn: int, shard: int, shards: int) -> int:
    """Reverse every other turn (a snake), so that no shard gets the longer piece each time."""
    return shard if turn % 2 == 0 else shards - 1 - shard


@lru_cache(maxsize=4)
def _epoch_order(plan: BatchPlan, epoch: int) -> np.ndarray:
    rows = len(plan.lengths)
    if plan.order == "longest-first":
        return np.argsort(-plan.lengths, kind="stable")
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([plan.seed, epoch])))
    order = random.permutation(rows)
    if plan.order == "window":
        return _sort_in_windows(order, plan, random)
    return order


def _sort_in_windows(order: np.ndarray, plan: BatchPlan, random: np.random.Generator) -> np.ndarray:
    """Sort each window by length and cut it into global batches; a short one and its mirror image, a long one, follow
    each other, pairs in any order.

    So any few steps see all lengths, as an optimizer's momentum does. In any order at all, some steps in a row would
    see short rows, or long ones, and forget the others. The ragged batch that ends an epoch stays as it was drawn.
    """
    result = []
    for start in range(0, len(order), plan.window * plan.global_batch):
        window = order[start : start + plan.window * plan.global_batch]
        count = len(window) // plan.global_batch
        whole, ragged = window[: count * plan.global_batch], window[count * plan.global_batch :]
        batches = whole[np.argsort(plan.lengths[whole], kind="stable")].reshape(count, plan.global_batch)
        drawn = random.permutation(count)
        pairs = dict.fromkeys(np.stack([drawn, count - 1 - drawn], axis=1).reshape(-1).tolist())
        result += [batches[list(pairs)].reshape(-1), ragged]
    return np.concatenate(result) if result else order


def _as_int(size: int | str) -> int:
    assert isinstance(size, int)  # 'auto' was resolved before any rank started
    return size

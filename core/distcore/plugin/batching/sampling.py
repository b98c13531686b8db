"""The rows of a global batch, and their split among ranks (laws 1, 2 and 4).

The rows of a global batch depend on seed, epoch and step only. The gradient is a sum over these
rows, so the split may depend on their lengths and on the number of ranks without changing the
result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Literal

import numpy as np

from distcore.config import RunConfig
from distcore.errors import StrategyError
from distcore.plugin.batching.columns import Column, common_value, is_windowed, read, whole
from distcore.plugin.batching.permutation import computed_rows, order_kind
from distcore.plugin.batching.token_budget import TokenCut, equal_bounds
from distcore.plugin.strategy.contract import MicroBatch, Run, Sampler
from distcore.plugin.task.datasets import order_of, pads
from distcore.plugin.task.task import Dataset
from distcore.rounding import ceil_div

GROUP = 64
"""Largest number of data shards whose rows are sorted together.

So a rank need not sort the whole global batch.
"""
EVALUATED = 128
"""Rows per data shard that an evaluation sorts and cuts together if it cuts by tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """The global batches of every epoch over a dataset."""

    lengths: Column
    """Length of each row of the dataset in tokens."""
    global_batch: int
    """Rows per optimizer step, over all ranks."""
    micro_batch: int
    """Largest number of rows per forward pass on one rank; ``by_tokens`` replaces it."""
    seed: int
    """Seed of the row order, which differs from epoch to epoch."""
    order: Literal["shuffled", "window", "longest-first", "sequential"] = "shuffled"
    """``shuffled``: random. ``window``: random, then grouped by length inside windows.

    ``longest-first``: by length. ``sequential``: as in the dataset.
    """
    window: int = 50
    """Size of a window in global batches; only for ``order="window"``."""
    own: Callable[[int, int], Column] | None = None
    """The dataset's own order by seed and epoch, in the place of a random one."""
    by_tokens: TokenCut | None = None
    """How to cut a global batch by tokens; ``None``: into slices with equal numbers of rows."""
    blocks: int | None = None
    """Cut each global batch into so many blocks, whatever the shards; ``None``: as suits these."""

    @property
    def steps(self) -> int:
        """Global batches per epoch; the last one may have fewer rows."""
        # Rounded up; not by ``ceil_div``, a further call in each step of every run.
        return -(-len(self.lengths) // self.global_batch)

    def size(self, step: int) -> int:
        """Return the number of rows of a step without reading them."""
        return min(self.global_batch, len(self.lengths) - step * self.global_batch)

    def rows(self, epoch: int, step: int) -> np.ndarray:
        """Return the rows of one global batch: int64, ``(global_batch,)``, or fewer at the end."""
        start = step * self.global_batch
        return _rows_at(self, epoch, start, start + self.size(step))

    def split(self, epoch: int, step: int, shard: int, shards: int) -> list[MicroBatch]:
        """Return the micro-batches of data shard ``shard`` out of ``shards``, for one step.

        A data shard is a rank, or a group of model-parallel ranks that see the same rows. Every
        shard gets the same number of micro-batches, and every row is in exactly one.

        Rows are sorted by length and cut into slices with equal numbers of rows, or ``by_tokens``.
        A micro-batch is one slice, so it needs little padding. In each round the shards take slices
        of similar cost, so they finish at nearly the same time. More than ``GROUP`` shards form
        groups, and each group splits its own part of the global batch.
        """
        if self.blocks is not None:
            return self._deal(self._cut(epoch, step, self.blocks), shard, shards)
        most = self._most_rows
        if shards == 1 and most is not None and self.size(step) <= most:
            return [MicroBatch(self.rows(epoch, step))]
        start = step * self.global_batch
        group = _group_of(shard, shards)
        rounds = self._rounds(epoch, step, shards)
        rows = self._part(epoch, step, group, shards)
        if rounds and rounds * len(group) == 1:
            return [MicroBatch(rows)]
        lengths = read(self.lengths, rows)
        order = np.argsort(lengths, kind="stable")  # stable: ties have the same order everywhere
        rows = rows[order]
        slices = self._slices(lengths[order], rounds, shard - group.start, len(group))
        micros: list[MicroBatch] = []
        for first, stop in slices:
            mine = rows[first:stop]
            # A step with fewer rows than slices: any row pads the slice, at weight 0.
            is_padding = not len(mine)
            if is_padding:
                # A group of shards without any row takes the first one of the step.
                mine = rows[:1] if len(rows) else _rows_at(self, epoch, start, start + 1)
            is_last = len(micros) == len(slices) - 1
            micros.append(MicroBatch(mine, is_padding=is_padding, last=is_last))
        return micros

    def _cut(self, epoch: int, step: int, count: int) -> list[np.ndarray]:
        """Return the rows of each block of a step, the cheapest block first.

        There are ``count`` blocks of like cost: more where a micro-batch may not be so large, fewer
        where there are not so many rows. No number of shards has a part in it.
        """
        rows = self.rows(epoch, step)
        lengths = read(self.lengths, rows)
        order = np.argsort(lengths, kind="stable")  # stable: ties have the same order everywhere
        if self.by_tokens is not None:
            bounds = self.by_tokens.block_bounds(lengths[order], count)
        else:
            fewest = -(-len(rows) // self.micro_batch)
            bounds = equal_bounds(len(rows), max(count, fewest))
        cut = [rows[order[first:stop]] for first, stop in pairwise(bounds)]
        return [block for block in cut if len(block)]

    def _deal(self, cut: list[np.ndarray], shard: int, shards: int) -> list[MicroBatch]:
        """Return the blocks of one shard; it pads where they cannot be dealt evenly."""
        numbers = list(range(len(cut)))
        if self.order in ("longest-first", "sequential"):
            numbers.reverse()  # an evaluation takes the longest rows first: they fail at once
        micros = []
        rounds = -(-len(cut) // shards)
        for index in range(rounds):
            # Every other round is reversed, to balance the work.
            place_in_round = shards - 1 - shard if index % 2 else shard
            position = index * shards + place_in_round
            is_padding = position >= len(cut)
            number = numbers[0 if is_padding else position]
            micro = MicroBatch(
                cut[number], is_padding=is_padding, last=index == rounds - 1, block=number
            )
            micros.append(micro)
        return micros

    def _part(self, epoch: int, step: int, group: range, shards: int) -> np.ndarray:
        """Return the rows of a step that a group of data shards splits, in the epoch's order."""
        start = step * self.global_batch
        size = self.size(step)
        first = start + group.start * size // shards
        stop = start + group.stop * size // shards
        return _rows_at(self, epoch, first, stop)

    def _rounds(self, epoch: int, step: int, shards: int) -> int | None:
        """Return the number of micro-batches per shard; ``None``: it follows from all lengths."""
        size = self.size(step)
        if self._most_rows is not None:
            return -(-size // (self._most_rows * shards))
        if shards <= GROUP:
            return None
        cut = self.by_tokens
        assert cut is not None  # else the most rows are known
        # All groups need the same number, because every micro-batch runs collectives. No group
        # knows the rows of the others, so all derive the number from the rows of the first group.
        first = _group_of(0, shards)
        rows_of_first_group = self._part(epoch, step, first, shards)
        lengths = np.sort(read(self.lengths, rows_of_first_group))
        rounds_of_first_group = cut.rounds(lengths, len(first))
        # The other groups, too, must keep the bound on rows of a micro-batch.
        longest = int(lengths[-1])
        rows_per_micro_batch = min(size, cut.most(longest))
        rounds_by_rows = ceil_div(size, rows_per_micro_batch * shards)
        return max(rounds_of_first_group, rounds_by_rows)

    def _slices(
        self, lengths: np.ndarray, rounds: int | None, shard: int, shards: int
    ) -> list[tuple[int, int]]:
        """Return first row and end of each micro-batch of a shard, in the order of the passes.

        ``lengths`` are those of the group's rows, in ascending order; ``shard`` is its number in
        the group, which has ``shards``.
        """
        if self.by_tokens is not None and self._common_length is None:
            assigned = self.by_tokens.assign(lengths, shards, rounds)[:, shard]
            slices = [(int(first), int(stop)) for first, stop in assigned]
            # An evaluation takes the longest rows first: they fail at once.
            evaluates = self.order in ("longest-first", "sequential")
            return slices[::-1] if evaluates else slices
        assert rounds is not None  # lengths that are known in advance
        bounds = equal_bounds(len(lengths), rounds * shards)
        slices = []
        for index in range(rounds):
            # Every other round is reversed, to balance the work.
            place_in_round = shards - 1 - shard if index % 2 else shard
            position = index * shards + place_in_round
            slices.append((bounds[position], bounds[position + 1]))
        return slices

    @cached_property
    def _most_rows(self) -> int | None:
        """Most rows of a micro-batch; ``None`` where they follow from the lengths of a step."""
        if self.by_tokens is None:
            return self.micro_batch
        if self._common_length is None:
            return None
        return self.by_tokens.fit(self._common_length)

    @cached_property
    def _common_length(self) -> int | None:
        return common_value(self.lengths)

    @cached_property
    def _longest_first(self) -> np.ndarray:
        return np.argsort(-whole(self.lengths), kind="stable")


def rank_sampler(plan: BatchPlan, shard: int, shards: int) -> Sampler:
    """Return the sampler of data shard ``shard`` out of ``shards``.

    These are rank and world size if each rank is a shard.
    """
    if not 0 <= shard < shards:
        raise StrategyError(
            f"hook build_sampler(): shard {shard} of {shards}; expected 0 to {shards - 1}"
        )
    # A partial, not a closure: a loader's processes may have to unpickle it.
    return partial(plan.split, shard=shard, shards=shards)


def training_plan(config: RunConfig, dataset: Dataset) -> BatchPlan:
    """Return the plan of a training run, as its resolved config says."""
    assert config.loader.length_grouping != "auto"  # resolved
    return BatchPlan(
        lengths=dataset.lengths,
        global_batch=config.global_batch_size,
        micro_batch=_rows(config, config.global_batch_size),
        seed=config.seed,
        order="window" if config.loader.length_grouping == "window" else "shuffled",
        window=config.loader.window,
        own=order_of(dataset),
        by_tokens=_token_cut(config, dataset),
        blocks=config.exact,
    )


def evaluation_plan(run: Run, dataset: Dataset) -> BatchPlan:
    """Return the plan of an evaluation: every row once, the longest first.

    A micro-batch that does not fit into memory then fails at the start. Rows keep the order of the
    dataset if the lengths cannot be read as a whole.
    """
    by_tokens = _token_cut(run.config, dataset)
    rows_of_shard = EVALUATED if by_tokens else _rows(run.config, EVALUATED)
    together = rows_of_shard * run.world.shards
    if run.config.exact is not None:
        together = EVALUATED  # whatever the shards, as the blocks are
    return BatchPlan(
        lengths=dataset.lengths,
        global_batch=together,
        micro_batch=_rows(run.config, together),
        seed=0,
        order="sequential" if is_windowed(dataset.lengths) else "longest-first",
        by_tokens=by_tokens,
        blocks=run.config.exact,
    )


def _token_cut(config: RunConfig, dataset: Dataset) -> TokenCut | None:
    """Return how a resolved config cuts steps by tokens; ``None`` if it does not."""
    if config.micro_batch_tokens is None:
        return None
    forward = config.loader.forward_tokens
    assert isinstance(forward, int)  # 'auto' was resolved before any rank started
    rows = None if config.micro_batch_size == "auto" else config.micro_batch_size
    return TokenCut(
        tokens=config.micro_batch_tokens, forward=forward, rows=rows, pads=pads(dataset, config)
    )


def _rows(config: RunConfig, unbounded: int) -> int:
    return unbounded if config.micro_batch_size == "auto" else config.micro_batch_size


def _group_of(shard: int, shards: int) -> range:
    """Return the data shards that split a part of a global batch with ``shard``."""
    if shards <= GROUP:
        return range(shards)
    groups = ceil_div(shards, GROUP)
    group = shard * groups // shards
    first = ceil_div(group * shards, groups)
    stop = ceil_div((group + 1) * shards, groups)
    return range(first, stop)


def _rows_at(plan: BatchPlan, epoch: int, start: int, stop: int) -> np.ndarray:
    """Return the rows at positions ``start`` to ``stop`` of an epoch, int64."""
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
    """Return rows of the random order, or of the dataset's own."""
    if plan.own is not None:
        return read(plan.own(plan.seed, epoch), np.arange(start, stop))
    if order_kind(len(plan.lengths)) == "permutation":
        return _stored(plan, epoch)[0][start:stop]
    return computed_rows(len(plan.lengths), plan.seed, epoch, start, stop)


@lru_cache(maxsize=1)  # used in every step; training goes through one epoch after another
def _stored(plan: BatchPlan, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the random order of an epoch, and that of the batches in each of its windows."""
    rows = len(plan.lengths)
    # Named, and not default_rng: a later numpy may choose another generator, and so another order.
    seeds = np.random.SeedSequence([plan.seed, epoch])
    random = np.random.Generator(np.random.PCG64(seeds))
    order = random.permutation(rows)
    batches = rows // plan.global_batch if plan.order == "window" else 0
    orders_of_windows = []
    for first in range(0, batches, plan.window):
        count = min(plan.window, batches - first)
        orders_of_windows.append(random.permutation(count))
    return order, orders_of_windows


@lru_cache(maxsize=2)  # a loader that works ahead may be in the next window already
def _window(plan: BatchPlan, epoch: int, number: int) -> np.ndarray:
    """Return a window: sorted by length, cut into global batches, and these in random pairs.

    A pair is the k-th shortest batch and the k-th longest, one after the other. Were the batches in
    a random order, a few steps in a row would often see only short rows or only long ones, and the
    optimizer's momentum would follow them. Rows at the end that do not fill a global batch keep
    their random order.
    """
    size = plan.window * plan.global_batch
    start = number * size
    window = _shuffled(plan, epoch, start, min(start + size, len(plan.lengths)))
    count = len(window) // plan.global_batch
    if not count:
        return window
    whole_batches, ragged = np.split(window, [count * plan.global_batch])
    by_length = np.argsort(read(plan.lengths, whole_batches), kind="stable")
    batches = whole_batches[by_length].reshape(count, -1)
    drawn = _drawn(plan, epoch, number, count)
    partners = count - 1 - drawn
    # A dict keeps the order and drops repeats: each pair comes up twice, and the middle batch is
    # its own partner.
    in_pairs = np.stack([drawn, partners], axis=1).reshape(-1)
    order = list(dict.fromkeys(in_pairs.tolist()))
    return np.concatenate([batches[order].reshape(-1), ragged])


def _drawn(plan: BatchPlan, epoch: int, number: int, count: int) -> np.ndarray:
    """Return a random order of the ``count`` batches of a window."""
    if order_kind(len(plan.lengths)) == "permutation":
        return _stored(plan, epoch)[1][number]
    seed = np.random.SeedSequence([plan.seed, epoch], spawn_key=(number,))
    return np.random.Generator(np.random.PCG64(seed)).permutation(count)

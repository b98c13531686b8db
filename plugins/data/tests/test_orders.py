"""The law of streams: over shards, windows and mixtures each row comes once in an
epoch of its source.

And wherever a run stops, with whatever ranks and workers it goes on, no row is lost or doubled.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from distcore import BatchPlan, ConstantColumn
from distcore.plugin.batching.sampling import rank_sampler
from distcore_data import MixedRows, RowOrder, WindowedRows
from distcore_data.orders import windows
from distcore_data.orders.mixtures import PERIOD, MixedEpoch, shares_of
from distcore_data.orders.windows import WindowedEpoch

SCHEDULES = 1000


def whole(order: RowOrder, seed: int, epoch: int) -> np.ndarray:
    column = order(seed, epoch)
    return column[np.arange(len(column))]


def random_windows(random: np.random.Generator, first: int = 0, key: int = 0) -> WindowedRows:
    """Shards of 0 to 8 rows, of which one may be the only one."""
    counts = random.integers(0, 9, int(random.integers(1, 9)))
    counts[0] += 1
    return WindowedRows(
        bounds=first + np.cumsum([0, *counts]), window=int(random.integers(1, 6)), key=key
    )


def random_order(random: np.random.Generator) -> WindowedRows | MixedRows:
    sources: list[WindowedRows] = []
    for key in range(int(random.integers(1, 4))):
        sources.append(random_windows(random, sources[-1].stop if sources else 0, key))
    if len(sources) == 1:
        return sources[0]
    first, *others = (
        shares_of(
            (
                random.uniform(0.05, 1, len(sources)) * (random.permutation(len(sources)) <= stage)
            ).tolist()
        )
        for stage in random.integers(0, 3, int(random.integers(1, 4))).tolist()
    )
    starts = np.sort(random.integers(1, 60, len(others))).tolist()
    return MixedRows(
        sources=tuple(sources), shares=first, later=tuple(zip(starts, others, strict=True))
    )


def sources_of(order: WindowedRows | MixedRows) -> tuple[WindowedRows, ...]:
    return (order,) if isinstance(order, WindowedRows) else order.sources


def check_epochs(order: WindowedRows | MixedRows, rows: np.ndarray) -> None:
    """Each stretch of a source's rows as long as the source has each of them once."""
    for source in sources_of(order):
        low, high = source.start, source.stop
        mine = rows[(rows >= low) & (rows < high)]
        for start in range(0, len(mine), high - low):
            stretch = mine[start : start + high - low].tolist()
            assert len(set(stretch)) == len(stretch)
            assert len(stretch) < high - low or sorted(stretch) == list(range(low, high))


@dataclass(frozen=True)
class Schedule:
    """A run in parts: each begins where the one before stopped, with other ranks."""

    plan: BatchPlan
    parts: tuple[tuple[int, int], ...]
    """Steps and data shards of each part."""

    def rows(self, reopen: Callable[[BatchPlan], BatchPlan]) -> list[list[int]]:
        """The rows of each step, of all ranks together; every part, and every worker, has a
        plan of its own.
        """
        steps, done = [], 0
        for count, shards in self.parts:
            samplers = [rank_sampler(reopen(self.plan), shard, shards) for shard in range(shards)]
            for step in range(done, done + count):
                epoch, inside = divmod(step, self.plan.steps)
                micros = chain.from_iterable(sampler(epoch, inside) for sampler in samplers)
                steps.append(
                    list(
                        chain.from_iterable(m.indices.tolist() for m in micros if not m.is_padding)
                    )
                )
            done += count
        return steps


def random_schedule(random: np.random.Generator, order: WindowedRows | MixedRows) -> Schedule:
    batch = int(random.integers(1, 13))
    plan = BatchPlan(
        lengths=ConstantColumn(len(order), 1),
        global_batch=batch,
        micro_batch=int(random.integers(1, 5)),
        seed=int(random.integers(100)),
        own=order,
    )
    parts = tuple(
        (int(random.integers(1, 9)), int(random.integers(1, 9)))
        for _ in range(int(random.integers(1, 5)))
    )
    return Schedule(plan, parts)


def check_schedule(schedule: Schedule, order: WindowedRows | MixedRows) -> None:
    """Each step has the planned rows, and all of them together are the order's, from its start."""
    # as a worker of a loader gets it
    fresh = schedule.rows(lambda plan: pickle.loads(pickle.dumps(plan)))
    positions = [
        whole(order, schedule.plan.seed, epoch)
        for epoch in range(-(-len(fresh) // schedule.plan.steps))
    ]
    planned = [
        epoch[start : start + schedule.plan.global_batch].tolist()
        for epoch in positions
        for start in range(0, len(epoch), schedule.plan.global_batch)
    ][: len(fresh)]
    assert list(map(Counter, fresh)) == list(map(Counter, planned))
    check_epochs(order, np.asarray(list(chain.from_iterable(planned)), np.int64))


@pytest.mark.programs
def test_a_thousand_random_schedules_lose_and_double_no_row() -> None:
    random = np.random.default_rng(0)
    for _ in range(SCHEDULES):
        order = random_order(random)
        check_schedule(random_schedule(random, order), order)


def off_by_one(order: WindowedEpoch, positions: np.ndarray) -> np.ndarray:
    """A window that begins one row late, as after a restart that counts the last batch as done."""
    return RIGHT(order, np.minimum(positions + 1, len(order) - 1))


def from_zero(order: WindowedEpoch, positions: np.ndarray) -> np.ndarray:
    """An order that begins at its start whenever a part of it is asked for, as a stream
    that was opened again.
    """
    return RIGHT(order, positions - positions[:1])


def by_call(order: WindowedEpoch, positions: np.ndarray) -> np.ndarray:
    """An order that is another one in each process."""
    return RIGHT(replace(order, seed=id(order)), positions)


def dropped_tails(order: WindowedEpoch, positions: np.ndarray) -> np.ndarray:
    """Shards that are cut to the shortest one, so that ranks read equal numbers of rows."""
    bounds = order.order.bounds
    assert isinstance(bounds, np.ndarray)
    rows, shortest = RIGHT(order, positions), int(np.diff(bounds).min())
    shard = np.searchsorted(bounds, rows, "right") - 1
    kept: np.ndarray = bounds[shard] + (rows - bounds[shard]) % max(1, shortest)
    return kept


RIGHT: Callable[[WindowedEpoch, np.ndarray], np.ndarray] = WindowedEpoch.__getitem__


@pytest.mark.parametrize("broken", [off_by_one, from_zero, by_call, dropped_tails])
def test_the_law_sees_a_broken_order_of_shards(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WindowedEpoch, "__getitem__", broken)
    with pytest.raises(AssertionError):
        test_a_thousand_random_schedules_lose_and_double_no_row()


def restarted(order: MixedEpoch, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sources that begin again with each epoch of the mixture: what is at their
    ends is never seen.
    """
    return DRAWS(replace(order, epoch=0), positions)


def independent(order: MixedEpoch, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that are drawn anew for each position, as by sampling with replacement."""
    sources, numbers = DRAWS(order, positions)
    return sources, np.random.default_rng(int(positions.sum())).integers(0, 10**6, len(numbers))


DRAWS: Callable[[MixedEpoch, np.ndarray], tuple[np.ndarray, np.ndarray]] = MixedEpoch.draws


def counted_anew(order: MixedEpoch, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sources that begin again where the weights change."""
    stages = order.order.stages
    everywhere = positions + order.epoch * len(order)
    at = np.searchsorted([stage.start for stage in stages], everywhere, "right") - 1
    sources, numbers = DRAWS(order, positions)
    return sources, numbers - np.stack([stage.before for stage in stages])[at, sources]


@pytest.mark.parametrize("broken", [restarted, independent, counted_anew])
def test_the_law_sees_a_broken_mixture(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixedEpoch, "draws", broken)
    with pytest.raises(AssertionError):
        test_a_thousand_random_schedules_lose_and_double_no_row()


def test_orders_differ_by_seed_and_epoch_and_source_and_repeat() -> None:
    orders = [WindowedRows(bounds=np.arange(0, 101, 10), window=4, key=key) for key in (0, 1)]
    drawn = {
        tuple(whole(order, seed, epoch)) for order in orders for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(drawn) == 8
    assert (
        whole(orders[0], 1, 2).tolist()
        == whole(pickle.loads(pickle.dumps(orders[0])), 1, 2).tolist()
    )


def test_a_window_has_rows_of_its_shards_only() -> None:
    order = WindowedRows(bounds=np.arange(0, 1001, 10), window=4)
    shards = (whole(order, 0, 0) // 10).reshape(25, 40)
    assert [len(set(window.tolist())) for window in shards] == [4] * 25
    assert any(np.diff(window).any() for window in np.sort(shards)[:, ::10])


def test_large_windows_are_computed_and_not_stored() -> None:
    order = WindowedRows(bounds=np.array([5, 100_000, 200_005]), window=2)
    assert np.array_equal(np.sort(whole(order, 0, 1)), np.arange(5, 200_005))
    assert order(0, 1)[np.arange(777, 800)].tolist() == whole(order, 0, 1)[777:800].tolist()


@pytest.mark.programs
def test_many_shards_are_computed_and_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = WindowedRows.even(5, 1003, 7, window=4)
    before, content = whole(stored, 0, 1), stored.content
    assert np.array_equal(
        before, whole(WindowedRows(bounds=np.append(np.arange(5, 1003, 7), 1003), window=4), 0, 1)
    )
    monkeypatch.setattr(windows, "STORED", 4)
    random = np.random.default_rng(1)
    for _ in range(SCHEDULES // 20):
        order = random_order(random)
        check_schedule(random_schedule(random, order), order)
    computed = WindowedRows.even(5, 1003, 7, window=4)
    assert content != computed.content
    for epoch in (0, 1):
        assert np.array_equal(np.sort(whole(computed, 0, epoch)), np.arange(5, 1003))
    assert not np.array_equal(whole(computed, 0, 1), before)
    firsts = [
        {*((computed(seed, epoch)[np.arange(28)] - 5) // 7)}
        for seed, epoch in ((0, 1), (0, 2), (1, 1))
    ]
    assert firsts[0] != firsts[1] != firsts[2] != firsts[0]


def test_a_hundred_million_rows_cost_as_much_at_their_end_as_at_their_start() -> None:
    rows = 10**8
    order = WindowedRows.even(0, rows, 64, window=1024)
    last = order(0, 3)[np.arange(rows - 256, rows)]
    assert len(set(last.tolist())) == 256
    assert len(set((last // 64).tolist())) <= 256


def mixture(*weights: float) -> MixedRows:
    sizes = [70, 30, 11][: len(weights)]
    ends = np.cumsum([0, *sizes])
    sources = [
        WindowedRows(bounds=ends[key : key + 2], window=1, key=key) for key in range(len(weights))
    ]
    return MixedRows(sources=tuple(sources), shares=shares_of(weights))


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (0.9, 0.05, 0.05), (3, 1)])
def test_every_beginning_of_a_mixture_is_within_a_row_of_its_weights(
    weights: tuple[float, ...],
) -> None:
    order, positions = mixture(*weights), np.arange(2 * PERIOD)
    sources, numbers = MixedEpoch(order, 0, 0).draws(positions)
    for source in range(len(weights)):
        taken = np.cumsum(sources == source)
        exact = (positions + 1) * order.shares[source] / PERIOD
        assert np.abs(taken - exact).max() < 1
        assert numbers[sources == source].tolist() == list(range(int(taken[-1])))


@pytest.mark.parametrize(
    "starts", [(5,), (5, 5 + 2 * PERIOD + 7), (PERIOD, PERIOD, PERIOD + 1, 3 * PERIOD)]
)
def test_each_source_goes_on_with_its_next_row_where_weights_change(
    starts: tuple[int, ...],
) -> None:
    weights = [(0.9, 0.1, 0), (0, 0.5, 0.5), (0.2, 0.3, 0.5), (1, 0, 0), (0.1, 0.1, 0.8)][
        : len(starts) + 1
    ]
    first, *others = map(shares_of, weights)
    order = replace(mixture(1, 1, 1), shares=first, later=tuple(zip(starts, others, strict=True)))
    positions = np.arange(5 * PERIOD)
    sources, numbers = MixedEpoch(order, 0, 0).draws(positions)
    for source in range(3):
        assert numbers[sources == source].tolist() == list(range(int((sources == source).sum())))
    for start, stop, by_source in zip(
        (0, *starts), (*starts, len(positions)), weights, strict=True
    ):
        counts = np.bincount(sources[start:stop], minlength=3)
        assert (
            np.abs(counts - np.asarray(by_source) * (stop - start)).max()
            <= 1 + (stop - start) / PERIOD
        )
    epoch, offset = divmod(starts[0] + 3, len(order))
    assert MixedEpoch(order, 0, epoch).draws(np.arange(offset, offset + 9))[0].tolist() == (
        sources[starts[0] + 3 :][:9].tolist()
    )


def test_sources_go_on_where_the_epoch_before_left_them() -> None:
    order = mixture(0.9, 0.1)
    rows = np.concatenate([whole(order, 0, epoch) for epoch in range(7)])
    check_epochs(order, rows)
    assert Counter((rows >= 70).tolist())[True] == pytest.approx(70, abs=1)  # of 700 rows a tenth


@pytest.mark.parametrize(
    "weights", [(1, 1e-9), (1.0,) * 7, (5e-324, 1), (0.2, 0.3, 0.5), (0, 1, 0), (1, 0, 1e-9)]
)
def test_shares_fill_a_period_and_leave_no_source_out(weights: tuple[float, ...]) -> None:
    shares = np.asarray(shares_of(weights))
    assert shares.sum() == PERIOD
    assert ((shares > 0) == (np.asarray(weights) > 0)).all()
    assert np.abs(shares - np.asarray(weights) / sum(weights) * PERIOD).max() <= 1


def test_an_order_tells_all_that_it_depends_on() -> None:
    one = WindowedRows(bounds=np.arange(0, 101, 10), window=4)
    others = [
        replace(one, window=5),
        replace(one, key=1),
        replace(one, bounds=np.arange(0, 101, 20)),
    ]
    mixed = [mixture(0.7, 0.3), mixture(0.6, 0.4)]
    changing = [replace(mixed[0], later=((start, mixed[1].shares),)) for start in (7, 8)]
    orders: list[RowOrder] = [one, *others, *mixed, *changing]
    assert len({order.content for order in orders}) == 8
    assert one.content == replace(one).content

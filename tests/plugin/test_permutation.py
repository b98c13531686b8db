"""The order of many rows is computed, not stored; that of fewer is what it always was."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from distcore import BatchPlan, Column
from distcore.plugin.batching.permutation import BLOCK, STORED_ROWS, Feistel, order_kind

SIZES = sorted(
    {*range(1, 40), *(2**k + d for k in range(5, 13) for d in (-1, 0, 1)), 10_007, BLOCK + 1}
)


class Only:
    """A column of lengths from 2 to 38 whose rows are computed, and that refuses to be
    read as a whole.
    """

    def __init__(self, rows: int, most: int = 2**20) -> None:
        self.rows, self.most, self.asked = rows, most, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray:
        assert isinstance(rows, np.ndarray)
        assert len(rows) <= self.most, "read as a whole"
        self.asked += len(rows)
        return rows * 2_654_435_761 % 37 + 2


@pytest.fixture
def few_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything above ten rows is many."""
    monkeypatch.setattr("distcore.plugin.batching.permutation.STORED_ROWS", 10)


def plan_of(lengths: Column, **changes: Any) -> BatchPlan:
    return BatchPlan(
        **({"lengths": lengths, "global_batch": 16, "micro_batch": 2, "seed": 0} | changes)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("rows", SIZES)
def test_the_computed_order_is_a_permutation_for_every_number_of_rows(rows: int) -> None:
    for seed, epoch in [(0, 0), (0, 1), (7, 0)]:
        assert np.array_equal(np.sort(Feistel(rows, seed, epoch).rows_at(0, rows)), np.arange(rows))


@pytest.mark.parametrize("rows", [STORED_ROWS + 1, 10**9, 2**40 + 3, 2**62])
def test_a_part_of_the_order_is_the_same_whoever_asks_for_it(rows: int) -> None:
    feistel, start = Feistel(rows, 0, 0), rows // 2
    part = feistel.rows_at(start, start + 1000)
    assert part.dtype == np.int64
    assert len(np.unique(part)) == 1000
    assert 0 <= part.min() <= part.max() < rows
    assert np.array_equal(part[10:20], feistel.rows_at(start + 10, start + 20))
    assert not len(feistel.rows_at(start, start))


def test_the_order_of_many_rows_never_changes() -> None:
    """A checkpoint names the order, so another order under the same name would
    resume at other rows.
    """
    window = plan_of(Only(2**22 + 1), order="window", window=4, seed=7)
    assert [window.rows(3, step)[:2].tolist() for step in (9, 2**18 - 1)] == [
        [3088131, 1980573],
        [3993077, 2931566],
    ]
    rows = Feistel(10**9, 7, 3).rows_at(123_456_789, 123_456_794)
    assert rows.tolist() == [728965880, 653310875, 125915308, 439018970, 802008904]


@pytest.mark.parametrize("rows", [2**22 + 1, 10**9])
def test_rows_are_spread_evenly_and_neighbors_have_nothing_in_common(rows: int) -> None:
    order = Feistel(rows, 0, 0).rows_at(0, 2**18) / rows
    counts = np.histogram(order, 256, (0, 1))[0]
    pairs = np.histogram2d(order[::2], order[1::2], 16, ((0, 1), (0, 1)))[0]
    # chi-square of 255 degrees of freedom: mean 255, standard deviation 23
    for occurrences in (counts, pairs):
        assert 160 < ((occurrences - occurrences.mean()) ** 2 / occurrences.mean()).sum() < 350
    for lag in (1, 2, 64, 1024, 2049):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 5 / 2**9


def test_epochs_and_seeds_have_orders_that_share_no_more_than_chance() -> None:
    orders = [Feistel(10**6, seed, epoch).rows_at(0, 10_000) for seed in (0, 1) for epoch in (0, 1)]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert np.sum(one == other) < 5
            assert len(np.intersect1d(one, other)) < 200  # 100 on average


@pytest.mark.usefixtures("few_are_stored")
@pytest.mark.parametrize("order", ["shuffled", "window", "sequential"])
@pytest.mark.parametrize("rows", [11, 75, 160, 161])
def test_an_epoch_holds_every_row_once_for_any_number_of_shards(order: str, rows: int) -> None:
    plan = plan_of(Only(rows, most=32), order=order, window=2)
    whole = [np.sort(plan.rows(1, step)) for step in range(plan.steps)]
    assert np.array_equal(np.sort(np.concatenate(whole)), np.arange(rows))
    for shards in (1, 2, 3, 70, 200):
        for step, expected in enumerate(whole):
            assert plan.size(step) == len(expected)
            shares = [plan.split(1, step, shard, shards) for shard in range(shards)]
            given = [micro.indices for share in shares for micro in share if not micro.is_padding]
            assert np.array_equal(np.sort(np.concatenate(given)), expected)
            assert len({len(share) for share in shares}) == 1
            assert all(
                1 <= len(micro.indices) <= plan.micro_batch for share in shares for micro in share
            )


@pytest.mark.usefixtures("few_are_stored")
@pytest.mark.parametrize("order", ["shuffled", "window"])
def test_a_resumed_run_sees_the_rows_that_the_first_would_have(order: str) -> None:
    plan, again = (plan_of(Only(161, most=32), order=order, window=2) for _ in range(2))
    expected = [plan.rows(0, step).tolist() for step in range(plan.steps)]
    assert [again.rows(0, step).tolist() for step in (7, 3, 10)] == [
        expected[step] for step in (7, 3, 10)
    ]
    others = [plan_of(Only(161), order=order, window=2, seed=1).rows(0, 7), plan.rows(1, 7)]
    assert all(rows.tolist() != expected[7] for rows in others)


@pytest.mark.usefixtures("few_are_stored")
def test_batches_in_a_window_of_many_rows_come_in_pairs_of_short_and_long() -> None:
    plan = plan_of(Only(352, most=176), order="window", window=11)
    drawn = []
    for window in (range(11), range(11, 22)):
        lengths = [plan.lengths[plan.rows(0, step)].mean() for step in window]
        places = np.argsort(np.argsort(lengths)).tolist()
        assert sorted(places) != places
        # the middle one of eleven has no partner
        paired = [place for place in places if place != 5]
        assert all(one + other == 10 for one, other in zip(paired[::2], paired[1::2], strict=True))
        drawn.append(places)
    assert drawn[0] != drawn[1]


def test_a_rank_of_many_asks_only_for_the_lengths_of_its_group() -> None:
    lengths = Only(10**9)
    micros = plan_of(lengths, global_batch=16_384 * 32, micro_batch=32).split(0, 5, 9_999, 16_384)
    assert [len(micro.indices) for micro in micros] == [32]
    assert lengths.asked == 64 * 32


@pytest.mark.parametrize("shards", [65, 128, 1000])
def test_groups_of_shards_get_like_work(shards: int) -> None:
    plan = plan_of(Only(2**23), global_batch=shards * 64, micro_batch=8)
    padded = [
        sum(
            len(micro.indices) * plan.lengths[micro.indices].max()
            for micro in plan.split(0, 0, shard, shards)
        )
        for shard in range(0, shards, 13)
    ]
    assert max(padded) < 1.15 * min(padded)


STORED = [
    ("shuffled", 75, 0, 0, 50, "afc0341d6292632a"),
    ("shuffled", 100_003, 7, 3, 50, "50e28ef112aad5c9"),
    ("window", 75, 0, 1, 2, "fe4d85e14238fc08"),
    ("window", 100_003, 7, 3, 50, "9b60be2a1208f64c"),
    ("window", 805, 1, 0, 60, "14df8801169cb29e"),
    ("window", 176, 0, 0, 11, "905a68e2f6840626"),
    ("window", 1607, 2, 1, 10, "b273537c64f88d87"),
    ("longest-first", 75, 0, 0, 50, "03678018caceec45"),
]
"""Order, rows, seed, epoch, window, and the start of the SHA-256 of all rows: checkpoints
depend on these orders.
"""


@pytest.mark.parametrize(("order", "rows", "seed", "epoch", "window", "digest"), STORED)
def test_the_order_of_few_rows_never_changes(
    order: str, rows: int, seed: int, epoch: int, window: int, digest: str
) -> None:
    lengths = np.random.default_rng(0).integers(2, 40, size=rows)
    plan = plan_of(lengths, order=order, seed=seed, window=window)
    whole = np.concatenate([plan.rows(epoch, step) for step in range(plan.steps)])
    assert hashlib.sha256(whole.astype("<i8").tobytes()).hexdigest().startswith(digest)


@pytest.mark.parametrize(
    ("rows", "shards", "order", "digest"),
    [
        (75, 3, "shuffled", "dc94211fee3b483c"),
        (805, 64, "shuffled", "a959f9c9c9bd7b74"),
        (805, 8, "window", "c28b5ff7fac71061"),
    ],
)
def test_the_split_of_few_shards_never_changes(
    rows: int, shards: int, order: str, digest: str
) -> None:
    lengths = np.random.default_rng(0).integers(2, 40, size=rows)
    plan = plan_of(lengths, order=order, global_batch=256 if rows > 100 else 16)
    micros = [
        plan.split(1, step, shard, shards) for step in range(plan.steps) for shard in range(shards)
    ]
    text = repr(
        [
            [(micro.indices.tolist(), micro.is_padding, micro.last) for micro in share]
            for share in micros
        ]
    )
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest)


def test_the_number_of_rows_from_which_on_the_order_is_computed() -> None:
    assert (STORED_ROWS, order_kind(2**22), order_kind(2**22 + 1)) == (
        2**22,
        "permutation",
        "feistel",
    )

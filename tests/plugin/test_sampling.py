"""Which rows make a global batch, and how they are split."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from distcore import BatchPlan
from distcore.errors import TaskError
from distcore.plugin.batching.columns import whole


def plan_of(rows: int, **changes: object) -> BatchPlan:
    lengths = np.random.default_rng(0).integers(2, 40, size=rows)
    return BatchPlan(
        **({"lengths": lengths, "global_batch": 16, "micro_batch": 2, "seed": 0} | changes)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("order", ["shuffled", "window", "longest-first"])
def test_an_epoch_holds_every_row_once(order: str) -> None:
    plan = plan_of(75, order=order, window=2)
    rows = np.concatenate([plan.rows(1, step) for step in range(plan.steps)])
    assert sorted(rows) == list(range(75))


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8, 32])
@pytest.mark.parametrize("rows", [1, 3, 16, 21])
def test_a_global_batch_is_split_exactly_with_as_many_micro_batches_for_every_shard(
    rows: int, shards: int
) -> None:
    plan = plan_of(rows)
    for step in range(plan.steps):
        shares = [plan.split(0, step, shard, shards) for shard in range(shards)]
        given = [micro.indices for share in shares for micro in share if not micro.is_padding]
        assert sorted(np.concatenate(given)) == sorted(plan.rows(0, step))
        assert len({len(share) for share in shares}) == 1
        assert all(
            1 <= len(micro.indices) <= plan.micro_batch for share in shares for micro in share
        )
        assert all(
            [micro.last for micro in share] == [False] * (len(share) - 1) + [True]
            for share in shares
        )


def test_epochs_and_seeds_differ_and_repeat() -> None:
    rows = [plan_of(75, seed=seed).rows(epoch, 0).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(batch) for batch in rows}) == 4
    assert plan_of(75).rows(1, 2).tolist() == plan_of(75).rows(1, 2).tolist()


def test_rows_of_like_length_share_a_micro_batch() -> None:
    plan = plan_of(64, global_batch=64, micro_batch=8)
    grouped = sum(
        plan.lengths[micro.indices].max() * 8
        for shard in (0, 1)
        for micro in plan.split(0, 0, shard, 2)
    )
    as_they_come = sum(plan.lengths[rows].max() * 8 for rows in plan.rows(0, 0).reshape(8, 8))
    assert grouped < 0.75 * as_they_come


def test_ranks_get_like_work() -> None:
    plan = plan_of(64, global_batch=64, micro_batch=8)
    work = [
        sum(plan.lengths[micro.indices].sum() for micro in plan.split(0, 0, shard, 2))
        for shard in (0, 1)
    ]
    assert max(work) < 1.1 * min(work)


# ten whole batches, and eleven: the middle one has no partner
@pytest.mark.parametrize("rows", [160, 176])
def test_batches_in_a_window_come_in_pairs_of_the_kth_shortest_and_the_kth_longest(
    rows: int,
) -> None:
    plan = plan_of(rows, order="window", window=11)
    lengths = np.array([plan.lengths[plan.rows(0, step)].mean() for step in range(plan.steps)])
    places = np.argsort(np.argsort(lengths)).tolist()
    middle = [place for place in places if 2 * place == len(places) - 1]
    paired = [place for place in places if place not in middle]
    assert all(
        one + other == len(places) - 1 for one, other in zip(paired[::2], paired[1::2], strict=True)
    )
    assert sorted(places) != places


def test_the_ragged_batch_of_an_epoch_is_not_its_longest_rows() -> None:
    plan = plan_of(805, order="window", window=60)
    assert plan.lengths[plan.rows(0, 50)].mean() < np.sort(whole(plan.lengths))[-5:].mean() - 5


def test_windows_need_less_padding_than_batches() -> None:
    def padded(order: str) -> int:
        plan = plan_of(800, order=order, window=10)
        return sum(16 * plan.lengths[plan.rows(0, step)].max() for step in range(plan.steps))

    assert padded("window") < 0.7 * padded("shuffled")


class Backward:
    """Rows from the last to the first, in every epoch one further."""

    def __init__(self, epoch: int, rows: int, asked: int = 0) -> None:
        self.epoch, self.rows, self.asked = epoch, rows, asked

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        return (self.epoch - 1 - positions)[self.asked :] % self.rows


@pytest.mark.parametrize("order", ["shuffled", "window"])
def test_a_dataset_may_say_the_order_of_its_rows(order: str) -> None:
    plan = plan_of(75, order=order, window=2, own=lambda seed, epoch: Backward(epoch + seed, 75))
    batches = [plan.rows(2, step).tolist() for step in range(plan.steps)]
    there = [row % 75 for row in range(76, 1, -1)]
    if order == "shuffled":
        assert batches == [there[start : start + 16] for start in range(0, 75, 16)]
    windows = [
        sorted(chain.from_iterable(batches[start : start + 2])) for start in range(0, plan.steps, 2)
    ]
    assert windows == [sorted(there[start : start + 32]) for start in range(0, 75, 32)]


def test_an_order_with_too_few_rows_is_one_line() -> None:
    plan = plan_of(75, own=lambda seed, epoch: Backward(epoch, 75, asked=1))
    with pytest.raises(
        TaskError, match=r"^dataset: its column Backward returned values of shape \(15,\) for rows"
    ):
        plan.rows(0, 0)

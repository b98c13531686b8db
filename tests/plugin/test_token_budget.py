"""How a step is cut into micro-batches by tokens: held for random rows, and against every
cut of few rows.
"""

from __future__ import annotations

import hashlib
from itertools import combinations, pairwise, product
from time import process_time

import numpy as np
import pytest

from distcore import BatchPlan, Capabilities, ConstantColumn, RunConfig
from distcore.config.schema import Loader
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.batching.token_budget import SIZELESS, TokenCut, _Sorted
from distcore.resolve.micro_batches import forward_tokens
from distcore.testing.problem import RandomRows

CUT = TokenCut(tokens=256, forward=20)


def ascending(rows: int, seed: int, longest: int = 64) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.sort(np.clip(random.lognormal(2.3, 0.8, rows).astype(np.int64), 1, longest))


def padded(lengths: np.ndarray, dealt: np.ndarray) -> np.ndarray:
    """Tokens of each micro-batch, padding included, shape ``(turns, shards)``."""
    return np.array(
        [
            [(stop - start) * lengths[stop - 1] * (stop > start) for start, stop in turn]
            for turn in dealt
        ]
    )


def time_of(lengths: np.ndarray, dealt: np.ndarray, forward: int) -> int:
    """Time of the shard that is done last."""
    return int((padded(lengths, dealt) + forward).sum(0).max())


def in_equal_slices(lengths: np.ndarray, shards: int, most: int = 32) -> np.ndarray:
    """The cut by rows, dealt the same way."""
    turns = -(-len(lengths) // (most * shards))
    bounds = [at * len(lengths) // (turns * shards) for at in range(turns * shards + 1)]
    dealt = np.array(list(pairwise(bounds))).reshape(turns, shards, 2)
    dealt[1::2] = dealt[1::2, ::-1].copy()
    return dealt


def cuts(rows: int, slices: int) -> list[list[int]]:
    """Every cut of so many rows into so many slices."""
    return [[0, *inner, rows] for inner in combinations(range(1, rows), slices - 1)]


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 100, 700])
@pytest.mark.parametrize("packed", [False, True])
def test_every_row_is_dealt_once_within_the_budget_and_as_often_to_every_shard(
    rows: int, shards: int, packed: bool
) -> None:
    for seed in range(5):
        # some rows are longer than the budget
        lengths = ascending(rows, seed, longest=300) * (1 + seed % 2 * 7)
        cut = TokenCut(tokens=256, forward=20, pads=not packed)
        dealt = cut.assign(lengths, shards)
        assert dealt.shape[1:] == (shards, 2)
        assert sorted(
            row for start, stop in dealt.reshape(-1, 2) for row in range(start, stop)
        ) == list(range(rows))
        tokens = [
            (
                lengths[start:stop].sum()
                if packed
                else (stop - start) * lengths[start:stop].max(initial=0)
            )
            for start, stop in dealt.reshape(-1, 2)
        ]
        sizes = (dealt[..., 1] - dealt[..., 0]).reshape(-1)
        assert all(
            some <= cut.tokens or size == 1 for some, size in zip(tokens, sizes, strict=True)
        )


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_for_one_shard_is_the_cheapest(seed: int) -> None:
    lengths = ascending(3 + seed % 8, seed)
    cut = TokenCut(tokens=150, forward=5 + seed)
    fitting = [
        sum((stop - start) * lengths[stop - 1] + cut.forward for start, stop in pairwise(bounds))
        for slices in range(1, len(lengths) + 1)
        for bounds in cuts(len(lengths), slices)
        if all(
            stop - start == 1 or (stop - start) * lengths[stop - 1] <= cut.tokens
            for start, stop in pairwise(bounds)
        )
    ]
    assert time_of(lengths, cut.assign(lengths, 1), cut.forward) == min(fitting)


@pytest.mark.parametrize("seed", range(40))
def test_the_costliest_of_a_given_number_of_micro_batches_costs_as_little_as_in_any_cut(
    seed: int,
) -> None:
    lengths, shards = ascending(6 + seed % 5, seed), 2 + seed % 2
    largest = padded(lengths, CUT.assign(lengths, shards, rounds=1)).max()
    every = [
        max((b - a) * lengths[b - 1] for a, b in pairwise(bounds))
        for bounds in cuts(len(lengths), shards)
    ]
    assert largest <= min(every) * 129 / 128


@pytest.mark.parametrize(
    ("shards", "rows"), [(1, 32), (2, 32), (2, 64), (4, 32), (4, 128), (8, 256)]
)
def test_a_cut_by_tokens_is_done_earlier_and_pads_less_than_slices_of_equally_many_rows(
    shards: int, rows: int
) -> None:
    for seed in range(20):
        lengths, cut = ascending(rows, seed, longest=128), TokenCut(tokens=4096, forward=96)
        by_tokens, by_rows = cut.assign(lengths, shards), in_equal_slices(lengths, shards)
        assert time_of(lengths, by_tokens, cut.forward) <= time_of(lengths, by_rows, cut.forward)
        assert padded(lengths, by_tokens).sum() <= padded(lengths, by_rows).sum()


def test_a_dearer_forward_pass_makes_fewer_micro_batches_and_packed_rows_the_fewest() -> None:
    lengths = ascending(64, 0)
    turns = [
        len(TokenCut(tokens=4096, forward=forward).assign(lengths, 2))
        for forward in (0, 40, 400, 4000)
    ]
    assert turns[0] > turns[1] > turns[2] == turns[3] == 1
    assert len(TokenCut(tokens=4096, forward=0, pads=False).assign(lengths, 1)) == 1


def test_shards_finish_together() -> None:
    for seed in range(10):
        work = padded(lengths := ascending(128, seed), CUT.assign(lengths, 4)).sum(0)
        assert work.max() < 1.2 * work.mean()


def plan_of(lengths: object, **changes: object) -> BatchPlan:
    given = {
        "lengths": lengths,
        "global_batch": 128,
        "micro_batch": 128,
        "seed": 0,
        "by_tokens": CUT,
    } | changes
    return BatchPlan(**given)  # type: ignore[arg-type]


def test_rows_of_one_length_make_micro_batches_of_equally_many() -> None:
    assert sizes(plan_of(ConstantColumn(256, 16)), 2) == [[16] * 4] * 2
    assert sizes(plan_of(np.full(256, 16)), 2) == [[16] * 4] * 2
    assert sizes(plan_of(ConstantColumn(256, 1000)), 64) == [[1, 1]] * 64


def test_a_length_of_one_token_says_nothing_so_rows_are_counted() -> None:
    assert sizes(plan_of(ConstantColumn(256, 1)), 1) == [[SIZELESS] * 4]
    assert sizes(
        plan_of(ConstantColumn(256, 1), by_tokens=TokenCut(tokens=256, forward=20, rows=64)), 1
    ) == [[64] * 2]


def test_rows_and_tokens_may_bound_a_micro_batch_together() -> None:
    lengths = np.random.default_rng(0).permutation(ascending(128, 0))
    plan = plan_of(lengths, by_tokens=TokenCut(tokens=256, forward=20, rows=5))
    assert max(size for shard in sizes(plan, 2) for size in shard) == 5


def test_groups_of_shards_with_rows_of_their_own_have_equally_many_micro_batches() -> None:
    lengths = ascending(12 * 65, 1)  # in the order of the rows the first group has the shortest
    plan = plan_of(
        lengths, global_batch=12 * 65, order="sequential", by_tokens=TokenCut(tokens=64, forward=5)
    )
    shares = [plan.split(0, 0, shard, 65) for shard in range(65)]
    assert len({len(share) for share in shares}) == 1
    given = [micro.indices for share in shares for micro in share if not micro.is_padding]
    assert sorted(np.concatenate(given)) == list(range(12 * 65))


def test_an_evaluation_begins_with_the_micro_batch_of_most_tokens() -> None:
    lengths = ascending(128, 3)
    plan = plan_of(lengths, order="longest-first")
    tokens = [len(micro.indices) * lengths[micro.indices].max() for micro in plan.split(0, 0, 0, 1)]
    assert tokens[0] == max(tokens)
    assert [micro.last for micro in plan.split(0, 0, 0, 1)] == [False] * (len(tokens) - 1) + [True]


@pytest.mark.parametrize(
    ("rows", "shards", "milliseconds"), [(32, 1, 1), (32, 2, 1), (4096, 1, 10), (4096, 64, 10)]
)
def test_planning_a_step_takes_no_time_that_counts(
    rows: int, shards: int, milliseconds: float
) -> None:
    lengths, cut, spent = ascending(rows, 0, longest=128), TokenCut(tokens=4096, forward=96), []
    for _ in range(7):
        start = process_time()
        cut.assign(lengths, shards)
        spent.append(process_time() - start)
    # three times what it takes here, for slower machines
    assert min(spent) * 1000 < 3 * milliseconds


class Packed(RandomRows):
    pads = False


def test_a_plan_follows_the_config_and_what_its_dataset_says() -> None:
    config = RunConfig(micro_batch_tokens=300, loader={"forward_tokens": 7})
    assert training_plan(config, RandomRows(50)).by_tokens == TokenCut(tokens=300, forward=7)
    assert training_plan(config, Packed(50)).by_tokens == TokenCut(
        tokens=300, forward=7, pads=False
    )
    rows = training_plan(RunConfig(micro_batch_size=8), RandomRows(50))
    assert (rows.by_tokens, rows.micro_batch) == (None, 8)
    both = config.model_copy(update={"micro_batch_size": 8})
    assert training_plan(both, RandomRows(50)).by_tokens == TokenCut(tokens=300, forward=7, rows=8)


def test_a_strategy_that_pays_for_each_micro_batch_gets_fewer() -> None:
    config = RunConfig(device="cpu")
    cheap, dear = Capabilities(spec_version=3), Capabilities(spec_version=3, forward_cost=2.5)
    assert forward_tokens(config, cheap) == 96
    assert forward_tokens(config, dear) == 240
    given = config.model_copy(update={"loader": Loader(forward_tokens=5)})
    assert forward_tokens(given, dear) == 5


def sizes(plan: BatchPlan, shards: int) -> list[list[int]]:
    """Rows of each micro-batch of each shard in the first step."""
    return [
        [len(micro.indices) for micro in plan.split(0, 0, shard, shards)] for shard in range(shards)
    ]


def test_the_costliest_slice_is_halved_where_fewer_slices_suffice() -> None:
    rows = _Sorted(TokenCut(tokens=64, forward=0), np.array([2, 2, 2, 2, 50]))
    assert rows.balanced_bounds(2, 64) == [0, 4, 5]
    assert rows.balanced_bounds(3, 64) == [0, 2, 4, 5]
    assert rows.balanced_bounds(4, 64) == [0, 1, 2, 4, 5]
    assert rows.balanced_bounds(7, 64) == [
        0,
        1,
        2,
        3,
        4,
        5,
        5,
        5,
    ], "no row is cut: the last slices are empty"


def test_cuts_never_change() -> None:
    """A resumed run would round otherwise, and its ranks would have other dropout masks."""
    cuts = hashlib.sha256()
    for rows, shards, packed, most in product((1, 5, 64, 230), (1, 2, 7), (False, True), (None, 3)):
        for tokens, forward in ((40, 0), (64, 3), (300, 90)):
            cut = TokenCut(tokens=tokens, forward=forward, rows=most, pads=not packed)
            for longest in (1, 7, 64):
                dealt = cut.assign(ascending(rows, rows + shards, longest), shards)
                cuts.update(f"{cut} {dealt.tolist()}".encode())
    for shards in (63, 64, 65, 130):
        plan = plan_of(
            ascending(12 * shards, 1),
            global_batch=12 * shards,
            by_tokens=TokenCut(tokens=64, forward=5),
        )
        for shard in (0, shards - 1):
            micros = [
                (micro.indices.tolist(), micro.is_padding)
                for micro in plan.split(0, 0, shard, shards)
            ]
            cuts.update(str(micros).encode())
    assert cuts.hexdigest()[:16] == "e9fa1f3a4a8cb73d"


def test_short_rows_fill_the_budget_too() -> None:
    dealt = TokenCut(tokens=40, forward=90).assign(np.array([1] * 40 + [2]), 1)
    assert sorted(map(tuple, dealt[:, 0].tolist())) == [(0, 40), (40, 41)]


def test_groups_of_shards_need_no_more_micro_batches_for_rows_of_one_token_among_longer_ones() -> (
    None
):
    lengths = np.array([1, *[2] * (65 * 40 - 1)])
    cut = TokenCut(tokens=10**6, forward=5)
    plan = plan_of(lengths, global_batch=65 * 40, order="sequential", by_tokens=cut)
    assert len(plan.split(0, 0, 0, 65)) == 1

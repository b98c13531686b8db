"""Settings worth a trial: each value can be set, and none is the job's own."""

from __future__ import annotations

from typing import Any

import pytest
from text_task import TEXTS

from distcore import registry
from distcore.config import RunConfig, load_config
from distcore.errors import DistcoreError
from distcore.plugin.options import build
from distcore.resolve.resolve import resolve
from distcore_workbench.tuning.settings import (
    THREADS,
    Environment,
    axes,
    is_same,
    micro_batches,
    name_of,
    options_tried,
    strategy_settings,
    with_setting,
)

JOB = {"device": "cpu", "task": TEXTS}
PLACE = Environment(cores=4, ranks=4, threads=4, compiles=True, forms=({"padding_free": "off"},))


@pytest.mark.parametrize("name", list(registry.offers("strategies")))
def test_options_that_a_strategy_declares_to_be_tried_exist(name: str) -> None:
    try:
        cls = registry.load("strategies", name)
    except DistcoreError as error:
        pytest.skip(str(error))
    declared: tuple[dict[str, Any], ...] = getattr(cls, "tunes", ({},))
    for options in declared:
        build("strategy", name, cls, options)


def test_each_value_of_each_axis_can_be_set_and_changes_the_job(resolved: RunConfig) -> None:
    tried = axes(resolved, resolved, PLACE, [])
    assert [axis.name for axis in tried] == [
        "strategy, ranks and threads",
        "ranks",
        "padding",
        "micro-batch",
        "compile",
        "loader",
        "recomputation",
    ]
    for axis in tried:
        for family in axis.families:
            for setting in family:
                config = with_setting(None, JOB, setting)
                assert THREADS in setting or config != with_setting(None, JOB, {})
    assert [name_of(family[0]) for family in tried[0].families] == ["threads=2"]  # 4 is what it has
    assert [family[0]["nproc"] for family in tried[1].families] == [2, 4]
    assert [family[0]["padding_free"] for family in tried[2].families] == ["off"]


def test_strategies_with_more_traffic_are_tried_behind_what_a_short_budget_has_time_for(
    resolved: RunConfig,
) -> None:
    families = [[{"strategy": name, "nproc": 2}] for name in ("least", "less", "more", "most")]
    tried = {axis.name: axis for axis in axes(resolved, resolved, PLACE, families)}
    assert list(tried)[-2:] == ["other strategies", "recomputation"]
    assert [one[0] for one in tried["strategy, ranks and threads"].families][-2:] == [
        one[0] for one in families[:2]
    ]
    assert tried["other strategies"].families == families[2:]
    # of 32 rows
    assert not tried["other strategies"].possible({"micro_batch_size": 32, "nproc": 2})


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, [32]),
        ({"micro_batch_size": 8}, [32, 16]),
        ({"micro_batch_size": 16, "global_batch_size": 48}, [48, 24, 12]),
    ],
)
def test_micro_batches_divide_the_rows_of_a_rank(changes: dict[str, Any], rows: list[int]) -> None:
    config = resolve(load_config(None, {**JOB, "out": "run", **changes})).config
    sizes = [one["micro_batch_size"] for one in micro_batches(config) if "micro_batch_size" in one]
    assert [size for size in sizes if size != "auto"] == rows


def test_a_micro_batch_that_the_ranks_cannot_share_is_not_tried(resolved: RunConfig) -> None:
    axis = next(one for one in axes(resolved, resolved, PLACE, []) if one.name == "micro-batch")
    rows = resolved.global_batch_size
    assert axis.possible({"micro_batch_size": rows})
    assert axis.possible({"nproc": 2, "micro_batch_size": rows // 2})
    assert not axis.possible({"nproc": 2, "micro_batch_size": rows})
    assert axis.possible({"nproc": 2, "micro_batch_tokens": 64})


def test_options_of_the_user_s_strategy_stay_under_those_that_are_tried(
    resolved: RunConfig,
) -> None:
    base = load_config(
        None, {**JOB, "strategy": "single", "strategy_options": {"own": 1, "size": 2}}
    )
    kept, other = (
        strategy_settings(base, name, False, [{"size": 3}], 2)[0] for name in ("single", "else")
    )
    assert kept["strategy_options"] == {"own": 1, "size": 3}
    assert other["strategy_options"] == {"size": 3}
    given = {"strategy": "single", "strategy_options.own": 1, "lr": 0.1}
    tried = with_setting(
        None, given, {"strategy": "else", "strategy_options": {"size": 3}, THREADS: 2}
    )
    assert (tried.strategy, tried.strategy_options, tried.lr) == ("else", {"size": 3}, 0.1)
    assert is_same({"strategy": "single", "strategy_options": {}, "nproc": 1}, resolved)
    assert not is_same({"strategy": "single", "strategy_options": {}, "nproc": 2}, resolved)


def test_options_that_are_named_with_a_strategy_stay_and_what_contradicts_them_is_not_tried() -> (
    None
):
    declared: list[dict[str, Any]] = [{}, {"size": 5}, {"size": 100, "deep": True}]
    assert options_tried(declared, {}) == declared
    assert options_tried(declared, {"size": 5}) == [{"size": 5}]
    assert options_tried(declared, {"wide": 1}) == [
        {"wide": 1},
        {"size": 5, "wide": 1},
        {**declared[2], "wide": 1},
    ]
    assert options_tried((), {"wide": 1}) == [{"wide": 1}]
    assert options_tried((), {}) == []

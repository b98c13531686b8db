"""``NAME:VALUE`` where a strategy is named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from distcore import ConfigError, StrategyError, load_config
from distcore.plugin.strategy.argument import shorthand_of
from distcore.resolve import strategies
from distcore.resolve.resolve import resolve


@pytest.mark.parametrize(
    ("short", "name", "options"),
    [
        ("deepspeed:3", "deepspeed", {"stage": 3}),
        ("fsdp:grad", "fsdp", {"sharding": "grad"}),
        ("accelerate:fsdp2", "accelerate", {"backend": "fsdp2"}),
        ("fsdp:sharding=grad,shard_size=2", "fsdp", {"sharding": "grad", "shard_size": 2}),
        ("mesh:tp=2", "mesh", {"tp": 2}),
        ("ddp", "ddp", {}),
    ],
)
def test_the_value_is_that_of_the_option_which_the_strategy_declares(
    short: str, name: str, options: dict[str, object]
) -> None:
    pytest.importorskip(f"distcore_{name}")
    config = strategies.expanded(load_config(None, {"strategy": short}))
    assert (config.strategy, config.strategy_options) == (name, options)
    assert strategies.expanded(config) is config


@pytest.mark.needs("distcore-fsdp")
def test_a_run_with_it_is_resolved_to_name_and_option() -> None:
    config = resolve(
        load_config(None, {"strategy": "fsdp:grad", "nproc": 2, "device": "cpu"})
    ).config
    assert (config.strategy, config.strategy_options) == ("fsdp", {"sharding": "grad"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "fsdp:"}, "strategy = 'fsdp:': expected a value of sharding after the colon"),
        (
            {"strategy": "single:2"},
            "'single' takes no value after a colon; use --set strategy_options.NAME=VALUE",
        ),
        (
            {"strategy": "fsdp:sharding=grad,wrap"},
            (
                "strategy = 'fsdp:sharding=grad,wrap': expected OPTION=VALUE,OPTION=VALUE after the"
                " colon, not 'wrap'"
            ),
        ),
        (
            {"strategy": "fsdp:wrap=1,wrap=2"},
            "expected OPTION=VALUE,OPTION=VALUE after the colon, not 'wrap=2'",
        ),
        (
            {"strategy": "fsdp:sharding=grad", "strategy_options.sharding": "full"},
            "strategy_options.sharding = 'full' says otherwise; leave one out",
        ),
        ({"strategy": "nothing:2"}, "no strategy named 'nothing'"),
        (
            {"strategy": "fsdp:grad", "strategy_options.sharding": "full"},
            (
                "strategy = 'fsdp:grad': strategy_options.sharding = 'full' says otherwise; leave"
                " one out"
            ),
        ),
    ],
)
@pytest.mark.needs("distcore-fsdp")
def test_a_value_behind_the_colon_without_a_meaning_is_one_line(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises((ConfigError, StrategyError), match=message):
        strategies.expanded(load_config(None, changes))


def test_a_shorthand_must_be_an_option() -> None:
    @dataclass(frozen=True)
    class Mine:
        shorthand = "depth"
        width: int = 1

    with pytest.raises(
        StrategyError, match="strategy 'mine': declares the shorthand 'depth', which is none of its"
    ):
        shorthand_of("mine", Mine)

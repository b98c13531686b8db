"""Every option keeps the laws; on four ranks, in one launch."""

from functools import cache

import pytest

from distcore import ConfigError, RunConfig, StrategyError
from distcore.testing import STRATEGIES
from distcore.testing.findings import Finding
from distcore.testing.problem import Problem
from distcore.testing.subject import Subject
from distcore_fsdp.strategy import FSDPStrategy

OPTIONS = {
    "hybrid": {"sharding": "hybrid", "shard_size": 2},
    "recomputed": {
        "activation_checkpointing": True,
        "forward_prefetch": 1,
        "backward_prefetch": 2,
        "wrap": 100,
    },
    "recomputed but products": {"activation_checkpointing": "products"},
    "offloaded": {"cpu_offload": True, "wrap": ["Block", "Embedding"]},
}
PLAIN = {"full": {}, "grad": {"sharding": "shard_grad_op"}, "none": {"sharding": "NO_SHARD"}}
"""Options that the contract also measures on two ranks."""
CASES = (
    "partitions",
    "ranks-without-rows",
    "unused-parameters",
    "clip-by-both",
    "every-size",
    "into-single",
    "from-single",
)
RANKS = 4


@cache
def findings(plain: bool) -> dict[str, dict[str, Finding]]:
    options = PLAIN if plain else OPTIONS
    cases = tuple(case for name, case in STRATEGIES.required.items() if name in CASES)
    configs = [
        RunConfig(strategy="fsdp", strategy_options=some, nproc=RANKS) for some in options.values()
    ]
    findings = STRATEGIES.measure_all([Subject(config=config, cases=cases) for config in configs])
    return {
        label: {f.case: f for f in of_one} for label, of_one in zip(options, findings, strict=True)
    }


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("label", [*OPTIONS, *PLAIN])
def test_law_holds_with_option(label, case):
    finding = findings(label in PLAIN)[label][case]
    assert finding.held, str(finding)


def resolve_options(changes=None, **options):
    from distcore.resolve.resolve import resolve

    job = {"strategy": "fsdp", "nproc": 4, "device": "cpu", "lr": 0.01, "out": "never-made"} | (
        changes or {}
    )
    resolve(RunConfig(strategy_options=options, **job), task=Problem())


def test_layers_are_recomputed_in_one_way():
    changes = {"gradient_checkpointing": True}
    with pytest.raises(
        ConfigError,
        match=r"activation_checkpointing: has no effect with gradient_checkpointing = true",
    ):
        resolve_options(changes, activation_checkpointing=True)


def test_a_shard_size_that_does_not_divide_the_ranks_names_those_that_do():
    with pytest.raises(
        ConfigError, match=r"shard_size = 3: must divide the 4 ranks \(possible: 1, 2, 4\)"
    ):
        resolve_options(sharding="hybrid", shard_size=3)


def test_a_shard_size_without_hybrid_is_refused():
    with pytest.raises(
        ConfigError, match=r"shard_size = 2: is for sharding = 'hybrid', not 'grad'"
    ):
        resolve_options(sharding="grad", shard_size=2)


def test_an_unknown_sharding_lists_the_known():
    with pytest.raises(
        StrategyError, match=r"sharding = 'half': expected 'full', 'grad', 'hybrid' or 'none'"
    ):
        resolve_options(sharding="half")


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(
        StrategyError, match=r"unknown option 'shardng' \(did you mean 'sharding'\?\)"
    ):
        resolve_options(shardng="full")


@pytest.mark.parametrize("value", [-1, 1.5, "some"])
def test_a_prefetch_that_is_no_count_is_refused(value):
    with pytest.raises(StrategyError, match=r"forward_prefetch"):
        resolve_options(forward_prefetch=value)


def test_hybrid_shards_over_the_ranks_of_a_machine_unless_told(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"shard_size = 3: must divide the 4 ranks"):
        resolve_options(sharding="hybrid")
    FSDPStrategy(sharding="hybrid", shard_size=2).check_config(RunConfig(nproc=4))


def test_bits_of_exact_are_kept_where_nothing_is_sent_in_16_bits() -> None:
    assert FSDPStrategy(sharding="hybrid").capabilities.exact == {"fp32", "bf16"}
    assert not FSDPStrategy(reduce_dtype="precision").capabilities.exact
    assert not FSDPStrategy(param_dtype="precision").capabilities.exact

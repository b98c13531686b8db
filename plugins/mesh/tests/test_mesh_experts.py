"""Mixtures of experts over ranks train as in one process: every gradient, the norm and every
parameter, whatever the family, and when nobody chooses a rank's experts.
"""

import pytest
from expert_cases import FAMILIES, STARVED, compare

from distcore import launch

pytestmark = pytest.mark.ranks

NO_PLAN = {"gpt_oss"}
"""Families without a plan for tp."""
ON_TWO = [({"ep": 2}, [*FAMILIES, STARVED]), ({"tp": 2}, [*FAMILIES.keys() - NO_PLAN])]
ON_FOUR = [
    ({"ep": 4}, ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]),
    ({"ep": 2, "shard": 4}, [*FAMILIES]),
    ({"ep": 2, "shard": 2, "replicate": 2}, ["mixtral", "olmoe", "gpt_oss"]),
    ({"ep": 2, "shard": 2, "tp": 2}, ["mixtral", "qwen3_moe", "deepseek_v3"]),
    ({"tp": 2, "shard": 2}, ["mixtral", "qwen3_moe", "deepseek_v3"]),
]


def compare_all(settings):
    """In a rank: what ``compare`` returns, by the number of the settings."""
    return [compare(options, names) for options, names in settings]


@pytest.fixture(scope="module")
def on_two():
    return launch(compare_all, ON_TWO, nproc=2)


@pytest.fixture(scope="module")
def on_four():
    return launch(compare_all, ON_FOUR, nproc=4)


def cases(settings):
    for number, (options, names) in enumerate(settings):
        text = ",".join(f"{name}={size}" for name, size in options.items())
        for name in sorted(names):
            yield pytest.param(number, name, id=f"{text}-{name}")


def check(ranks, number, name):
    for rank in ranks:
        errors, _ = rank[number][name]
        worst = max(errors, key=lambda at: errors[at])
        assert errors[worst] < 1e-5, worst


@pytest.mark.parametrize(("number", "name"), [*cases(ON_TWO)])
def test_two_ranks_train_a_mixture_as_one_process(number, name, on_two):
    check(on_two, number, name)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [*cases(ON_FOUR)])
def test_four_ranks_train_a_mixture_as_one_process(number, name, on_four):
    check(on_four, number, name)


def test_a_rank_holds_its_part_of_the_experts_alone(on_two):
    for rank in on_two:
        for name in FAMILIES:
            assert rank[0][name][1] < 0.51

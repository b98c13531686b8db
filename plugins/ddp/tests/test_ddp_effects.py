"""Each option of ``ddp`` has an effect on DDP itself or on what it sends; an option without one is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from traffic import Traffic

from distcore import ConfigError, Datasets, RunConfig, StrategyError, launch
from distcore.plugin.strategy.hooks import Hooks
from distcore.resolve.resolve import resolve
from distcore.testing.lab import Job
from distcore.testing.problem import WIDTH, Classifier, Problem
from distcore.testing.rank import lab_of
from distcore.testing.subject import Subject
from distcore_ddp.strategy import DDPStrategy

SIDE = 512
"""A layer of this width and height has a weight of one MiB."""


@dataclass(frozen=True, kw_only=True)
class Wide(Problem):
    """Its gradients are some MiB, and it may have a layer that no forward pass calls."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        model: Any = Classifier(blocks=self.blocks, unused=self.unused)
        wide = [nn.Linear(SIDE, SIDE) for _ in range(3)]
        model.frozen = nn.Sequential(nn.Linear(WIDTH, SIDE), *wide, nn.Linear(SIDE, WIDTH))
        return model  # type: ignore[no-any-return]


def buckets(job: Job) -> int:
    """Return how many all-reduces of gradients a step makes, as torch logs it from the second one on."""
    job.train(2)
    return int(job.run.strategy_state.wrapped._get_ddp_logging_data()["num_buckets_reduced"])


def is_static(job: Job) -> bool:
    job.train(1)
    return bool(job.run.strategy_state.wrapped._get_ddp_logging_data().get("static_graph"))


def trains_with_unused_parameters(job: Job) -> bool:
    try:
        job.train(1)
    except StrategyError:
        return False
    return True


def sent_in(job: Job) -> set[torch.dtype]:
    """Return the dtypes of large all-reduces."""
    with Traffic() as traffic:
        job.train(1)
    return {dtype for name, dtype, elements in traffic.sent if name == "allreduce_" and elements > SIDE}


@dataclass(frozen=True)
class Effect:
    """What an option changes: a measurement, its result by default, and with values of the option."""

    measured: Callable[[Job], object]
    default: object
    changed: dict[Any, object]
    unused: bool = False


EFFECTS = {
    "bucket_mb": Effect(buckets, 1, {1: 4, 0: 25}),
    "static_graph": Effect(is_static, False, {True: True}),
    "find_unused": Effect(trains_with_unused_parameters, False, {True: True}, unused=True),
    "compression": Effect(sent_in, {torch.float32}, {"fp16": {torch.float16}, "bf16": {torch.bfloat16}}),
}
"""One for each option: a new option comes with its effect."""


def measured(folder: Path) -> dict[tuple[str, Any], object]:
    config = RunConfig(strategy="ddp", nproc=2, device="cpu")
    results = {}
    with lab_of(Subject(config=config, cases=()), folder) as lab:
        for option, effect in EFFECTS.items():
            for value in (None, *effect.changed):
                strategy = DDPStrategy(**({} if value is None else {option: value}))
                job = lab.job(Wide(unused=effect.unused), Hooks("ddp", strategy), max_steps=2)
                results[option, value] = effect.measured(job)
    return results


def test_each_option_has_an_effect_in_the_table() -> None:
    assert EFFECTS.keys() == {field.name for field in fields(DDPStrategy)}


@pytest.mark.ranks
def test_each_option_has_its_effect(tmp_path: Path) -> None:
    (results, _) = launch(measured, tmp_path, nproc=2)
    for option, effect in EFFECTS.items():
        assert results[option, None] == effect.default, option
        for value, expected in effect.changed.items():
            assert results[option, value] == expected, (option, value)


def resolved(task: Problem, **options: Any) -> None:
    job: dict[str, Any] = {"strategy": "ddp", "strategy_options": options, "nproc": 2, "device": "cpu", "lr": 0.1}
    resolve(RunConfig(**job, out="never-made"), task=task)


def test_of_two_options_of_which_torch_ignores_one_both_are_named() -> None:
    with pytest.raises(ConfigError, match=r"find_unused = true: has no effect with static_graph = true, .*leave out"):
        resolved(Problem(), static_graph=True, find_unused=True)


def test_a_bucket_of_negative_size_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"bucket_mb = -1: must be greater than or equal to 0"):
        resolved(Problem(), bucket_mb=-1)


def test_sparse_gradients_are_refused_in_fp16_which_torch_cannot_add() -> None:
    assert "sparse gradients" in DDPStrategy(compression="fp16").capabilities.lacks
    assert not DDPStrategy(compression="bf16").capabilities.lacks

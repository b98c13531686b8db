"""Each option of ``ddp`` has an effect on DDP itself or on what it sends; an option
without one is refused.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from option_effects import SIDE, Effect, Wide, assert_effects, trains
from traffic import Traffic

from distcore import ConfigError, RunConfig, StrategyError
from distcore.resolve.resolve import resolve
from distcore.testing.lab import Job
from distcore.testing.problem import Problem
from distcore_ddp.strategy import DDPStrategy


def buckets(job: Job) -> int:
    """Return how many all-reduces of gradients a step makes, as torch logs it from
    the second one on.
    """
    job.train(2)
    return int(job.run.strategy_state.wrapped._get_ddp_logging_data()["num_buckets_reduced"])


def is_static(job: Job) -> bool:
    job.train(1)
    return bool(job.run.strategy_state.wrapped._get_ddp_logging_data().get("static_graph"))


def sent_in(job: Job) -> set[torch.dtype]:
    """Return the dtypes of large all-reduces."""
    with Traffic() as traffic:
        job.train(1)
    return {
        dtype for name, dtype, elements in traffic.sent if name == "allreduce_" and elements > SIDE
    }


EFFECTS = {
    "bucket_mb": Effect(
        measured=buckets,
        problem=Wide(),
        default=1,
        changed=(({"bucket_mb": 1}, 4), ({"bucket_mb": 0}, 25)),
    ),
    "static_graph": Effect(
        measured=is_static, default=False, changed=(({"static_graph": True}, True),)
    ),
    "find_unused": Effect(
        measured=trains,
        problem=Problem(unused=True),
        default=False,
        changed=(({"find_unused": True}, True),),
    ),
    "compression": Effect(
        measured=sent_in,
        problem=Wide(),
        default={torch.float32},
        changed=(
            ({"compression": "fp16"}, {torch.float16}),
            ({"compression": "bf16"}, {torch.bfloat16}),
        ),
    ),
}
"""One for each option: a new option comes with its effect."""


def test_each_option_has_an_effect_in_the_table() -> None:
    assert EFFECTS.keys() == {field.name for field in fields(DDPStrategy)}


@pytest.mark.ranks
def test_each_option_has_its_effect(tmp_path: Path) -> None:
    assert_effects("ddp", EFFECTS, tmp_path)


def resolved(task: Problem, **options: Any) -> None:
    job: dict[str, Any] = {
        "strategy": "ddp",
        "strategy_options": options,
        "nproc": 2,
        "device": "cpu",
        "lr": 0.1,
    }
    resolve(RunConfig(**job, out="never-made"), task=task)


def test_two_options_of_which_torch_ignores_one_are_both_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"find_unused = true: has no effect with static_graph = true, .*leave out",
    ):
        resolved(Problem(), static_graph=True, find_unused=True)


def test_dp_takes_no_options() -> None:
    with pytest.raises(
        StrategyError, match=r"strategy 'dp': unknown option 'bucket_mb' \(options: none\)"
    ):
        resolve(
            RunConfig(strategy="dp", strategy_options={"bucket_mb": 5}, lr=0.1, out="never-made"),
            task=Problem(),
        )


def test_a_bucket_of_negative_size_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"bucket_mb = -1: must be greater than or equal to 0"):
        resolved(Problem(), bucket_mb=-1)


def test_sparse_gradients_are_refused_in_fp16_which_torch_cannot_add() -> None:
    assert "sparse gradients" in DDPStrategy(compression="fp16").capabilities.lacks
    assert not DDPStrategy(compression="bf16").capabilities.lacks

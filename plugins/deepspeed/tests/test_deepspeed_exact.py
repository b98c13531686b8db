"""``--exact`` with DeepSpeed: what is declared, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distcore import Clip, ConfigError, RunConfig, StrategyError
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem
from distcore_deepspeed.engine import step_on_whole_gradients
from distcore_deepspeed.json_config import read_config
from distcore_deepspeed.resolve_config import derived_settings
from distcore_deepspeed.strategy import DeepSpeedStrategy


@pytest.mark.parametrize(
    ("options", "precisions"),
    [
        ({}, {"fp32"}),
        ({"stage": 1}, {"fp32"}),
        ({"stage": 0}, set()),
        ({"stage": 3}, set()),
        ({"offload_optimizer": "cpu"}, set()),
        ({"config": {"gradient_clipping": 1.0}}, set()),
    ],
)
def test_bits_are_kept_by_stages_1_and_2_as_they_are(
    options: dict[str, Any], precisions: set[str]
) -> None:
    assert DeepSpeedStrategy(**options).capabilities.exact == precisions


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"precision": "bf16"}, "'deepspeed' with these options does not keep the same bits"),
        ({"optimizer": "deepspeed-adamw"}, "optimizer 'deepspeed-adamw' is strategy 'deepspeed'"),
    ],
)
def test_what_does_not_keep_the_bits_is_refused_in_one_line(
    changes: dict[str, Any], says: str
) -> None:
    values = {"strategy": "deepspeed", "nproc": 2, "device": "cpu", "exact": 2, "lr": 1e-3}
    config = RunConfig.model_validate(values | changes)
    with pytest.raises(ConfigError, match=f"^exact = 2: .*{says}") as refused:
        resolve(config, task=Problem())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("micro", ["auto", 64])
def test_rows_that_ranks_cannot_share_equally_have_numbers_that_deepspeed_takes(
    micro: Any,
) -> None:
    config = RunConfig(global_batch_size=32, micro_batch_size=micro, exact=4)
    settings = {
        setting.path: setting.value
        for setting in derived_settings(read_config(None, "config"), config, ranks=3)
    }
    numbers = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    rows, accumulation, whole = (settings[number] for number in numbers)
    assert rows * accumulation * 3 == whole


def test_a_parameter_without_a_gradient_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.weight.grad = torch.zeros(2, 2)
    run: Any = SimpleNamespace(
        config=RunConfig(exact=2), module=module, strategy_state=SimpleNamespace(optimizer=None)
    )
    with pytest.raises(StrategyError, match=r"^exact = 2: parameter 'bias' has no gradient"):
        step_on_whole_gradients(run, Clip())

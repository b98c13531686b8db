"""The laws on Accelerate's DDP and on its DeepSpeed, ZeRO-2 and 3 and from a JSON file."""

from __future__ import annotations

from typing import ClassVar

import pytest

from distcore.testing import StrategyContract


class TestDDP(StrategyContract):
    strategy = "accelerate"


@pytest.mark.slow  # distcore-ddp has the laws with this option, too
class TestFindUnused(StrategyContract):
    strategy = "accelerate"
    options: ClassVar = {"find_unused": True}


@pytest.mark.slow  # the JSON below is stage 2, too
class TestZeRO2(StrategyContract):
    strategy = "accelerate"
    options: ClassVar = {"backend": "deepspeed", "zero_stage": 2}
    limit = 60.0


class TestZeRO3(StrategyContract):
    strategy = "accelerate"
    options: ClassVar = {"backend": "deepspeed", "zero_stage": 3}
    limit = 60.0


@pytest.mark.slow  # stage 3 above takes the same way to the engine
class TestDeepSpeedJson(StrategyContract):
    """DeepSpeed's own AdamW, so that Accelerate must be given its dummy; every value that
    distcore knows is auto.
    """

    strategy = "accelerate"
    alone = True
    options: ClassVar = {
        "backend": "deepspeed",
        "deepspeed_config": {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "zero_optimization": {"stage": 2, "overlap_comm": False},
        },
    }
    limit = 60.0

"""Each optimizer under each strategy that takes it is the one of a single process, and its
checkpoints go both ways.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from optimizer_cases import OPTIONS, errors_of

from distcore import launch, registry
from distcore.model.optim import optimizer_class
from distcore.plugin.options import build
from distcore.plugin.strategy.hooks import capabilities_of
from distcore.testing.findings import BF16, FP32

pytestmark = pytest.mark.ranks

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "fsdp replicated": ("fsdp", {"sharding": "none"}),
    "horovod": ("horovod", {}),
    "deepspeed 0": ("deepspeed", {"stage": 0}),
    "deepspeed 1": ("deepspeed", {"stage": 1}),
    "deepspeed 2": ("deepspeed", {"stage": 2}),
    "deepspeed 3": ("deepspeed", {"stage": 3}),
    "accelerate": ("accelerate", {}),
    "accelerate deepspeed 2": ("accelerate", {"backend": "deepspeed", "zero_stage": 2}),
    "accelerate deepspeed 3": ("accelerate", {"backend": "deepspeed", "zero_stage": 3}),
}
BOUNDS = {"muon": BF16}
"""Of tensors, where it is not that of fp32: Muon orthogonalizes in bf16, whoever trains."""
FIGURES = {"muon": BF16 / 10}
"""The same of losses and norms: processors round products in bf16 in different ways;
one ends 2e-4 apart.
"""


def taken(strategy: str, options: dict[str, Any]) -> list[str]:
    """The optimizers of distcore that the strategy declares to take."""
    declared = capabilities_of(
        strategy, build("strategy", strategy, registry.load("strategies", strategy), options)
    )
    return [
        name
        for name in OPTIONS
        if declared.takes_optimizer(name, optimizer_class(name).elementwise)
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_optimizer_that_is_taken_is_that_of_one_process(setting: str, tmp_path: Path) -> None:
    """Laws 2 and 5, with groups of several rates."""
    strategy, options = SETTINGS[setting]
    if strategy not in registry.offers("strategies"):
        pytest.skip(f"{strategy} is not installed")
    names = taken(strategy, options)
    assert {"adamw", "adam", "sgd", "lion"} <= set(names)
    for of_rank in launch(
        partial(errors_of, strategy, options, names, tmp_path), nproc=2, timeout=200
    ):
        for name, errors in of_rank.items():
            wrong = {
                what: error for what, error in errors.items() if not error <= BOUNDS.get(name, FP32)
            }
            assert not wrong, f"{name} under {setting}: {wrong}"
            figures = max(errors["losses"], errors["norms"])
            assert figures < FIGURES.get(name, 10 * FP32), f"{name} under {setting}: {figures}"

"""Each optimizer under each strategy that takes it is the one of a single process, and its checkpoints go both ways."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import OPTIONS, errors_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distcore import RunConfig, join_process_group, launch, leave_process_group, registry
from distcore.model.optim import optimizer_class
from distcore.model.optimizers.muon import WholeMuon
from distcore.plugin.options import build
from distcore.plugin.strategy.contract import RankInfo
from distcore.plugin.strategy.hooks import capabilities_of
from distcore.rank_environment import join
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
"""The same of losses and norms: processors round products in bf16 in different ways; one ends 2e-4 apart."""


def taken(strategy: str, options: dict[str, Any]) -> list[str]:
    """The optimizers of distcore that the strategy declares to take."""
    declared = capabilities_of(strategy, build("strategy", strategy, registry.load("strategies", strategy), options))
    return [name for name in OPTIONS if declared.takes_optimizer(name, optimizer_class(name).elementwise)]


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
    for found in launch(partial(errors_of, strategy, options, names, tmp_path), nproc=2, timeout=200):
        for name, errors in found.items():
            wrong = {what: error for what, error in errors.items() if not error <= BOUNDS.get(name, FP32)}
            assert not wrong, f"{name} under {setting}: {wrong}"
            figures = max(errors["losses"], errors["norms"])
            assert figures < FIGURES.get(name, 10 * FP32), f"{name} under {setting}: {figures}"


def sharded_and_whole() -> tuple[float, float]:
    """Muon on shards against Muon on whole matrices, for the same gradients: how far apart weights and moments are."""
    world = join_process_group(RunConfig(device="cpu", timeout=60), join() or RankInfo())
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in ((5, 8), (16, 6))]
    shards = [nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in whole]
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = torch.optim.Muon(whole, **settings), WholeMuon(shards, **settings)
    for _ in range(5):
        for p, shard in zip(whole, shards, strict=True):
            p.grad = torch.randn_like(p)
            shard.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    moments = [
        [optimizer.state[p]["momentum_buffer"] for p in ps]
        for optimizer, ps in zip(optimizers, (whole, shards), strict=True)
    ]
    found = largest(whole, shards), largest(*moments)
    leave_process_group(world)
    return found


def largest(whole: list[Any], shards: list[Any]) -> float:
    def gathered(shard: Tensor) -> Tensor:
        assert isinstance(shard, DTensor)
        return shard.full_tensor()

    return max(float((gathered(b) - a).detach().abs().max()) for a, b in zip(whole, shards, strict=True))


def test_muon_on_shards_is_muon_on_whole_matrices() -> None:
    """Closer than the bound above, which would not tell sums of rounded shards from it."""
    for weights, moments in launch(sharded_and_whole, nproc=2, timeout=60):
        assert weights < 1e-6
        assert moments == 0

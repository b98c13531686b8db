"""Hooks of a module, metrics, and extensions that touch gradients or weights do on
ranks as in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distcore import RunConfig, train
from distcore.checkpoint import read_tensors
from distcore.testing.reference import largest_difference

pytestmark = pytest.mark.ranks

MINE = """
import torch
from distcore import Simple, hookimpl
from torch import nn
from torch.utils.data import TensorDataset

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))

class Mine(Simple):
    metrics = {"loss": "min", "slope": "min"}

    def data(self):
        return TensorDataset(X), TensorDataset(X[:4])

    def model(self):
        net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
        net[0].weight.register_hook(lambda gradient: gradient * (torch.arange(8) % 2))
        return net

    def row_loss(self, model, batch):
        return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square()[:, 0]

    def row_metrics(self, model, batch):
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x)
        return {"slope": slope.norm(dim=1)}

class Clamps:
    @hookimpl(wrapper=True)
    def step(self, run):
        for parameter in run.module.parameters():
            parameter.grad.clamp_(-BOUND * run.loss_multiplier, BOUND * run.loss_multiplier)
        return (yield)

class Shrinks:
    @hookimpl
    def on_step_end(self, run):
        with torch.no_grad():
            for parameter in run.module.parameters():
                parameter.mul_(0.9)
"""
BOUND = 0.5
"""Larger gradients are cut: what holds for the whole gradient does not hold for a
rank's share of it.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(f"BOUND = {BOUND}\n{MINE}")
    trained(folder, "single", 1)
    return folder


def trained(folder: Path, strategy: str, ranks: int) -> Path:
    out = folder / strategy.replace(":", "-")
    mine = folder / "mine.py"
    config = RunConfig.model_validate(
        {
            "task": f"{mine}:Mine",
            "out": str(out),
            "strategy": strategy,
            "nproc": ranks,
            "device": "cpu",
            "lr": 0.05,
            "optimizer": {"name": "sgd", "weight_decay": 0.0},
            "max_steps": 4,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "extensions": {f"{mine}:Clamps": True, f"{mine}:Shrinks": True, "progress": False},
        }
    )
    train(config)
    return out / "checkpoints/step-00000004"


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.needs("distcore-ddp")),
        pytest.param("fsdp", marks=pytest.mark.needs("distcore-fsdp")),
        pytest.param("horovod", marks=pytest.mark.needs("distcore-horovod")),
        pytest.param(
            "accelerate", marks=[pytest.mark.needs("distcore-accelerate"), pytest.mark.slow]
        ),
    ],
)
def test_weights_are_those_of_one_process(strategy: str, folder: Path) -> None:
    if strategy == "horovod":
        pytest.importorskip(
            "distcore_horovod.strategy", reason="needs Horovod", exc_type=ImportError
        )
    weights = dict(read_tensors(trained(folder, strategy, 2), ("model",)))
    expected = dict(read_tensors(folder / "single/checkpoints/step-00000004", ("model",)))
    assert largest_difference(weights, expected)[0] < 1e-6

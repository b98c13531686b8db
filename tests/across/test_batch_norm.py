"""Batch normalization over the global batch: training equals plain PyTorch with whole batches, however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcore import RunConfig, Simple, load_config, train
from distcore.checkpoint import read_tensors
from distcore.plugin.batching.sampling import training_plan
from distcore.testing.reference import apart, state_of

STEPS = 6
CONFIG: dict[str, Any] = {
    "lr": 1e-2, "max_steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2, "device": "cpu", "log_every": 1,
    "optimizer": {"eps": 1e-2, "weight_decay": 0.0}, "extensions": {"progress": False}, "checkpoints": {"best": None},
    "schedule": {"name": "constant"}, "clip": {"norm": None}, "log_level": "error",
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False)
        self.norm, self.other, self.head = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.Linear(4, 3)
        self.recomputes = False

    def body(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.other(self.second(self.norm(self.first(images)).relu())).relu()
        return hidden

    def forward(self, images: Tensor) -> Tensor:
        hidden = checkpoint(self.body, images, use_reentrant=False) if self.recomputes else self.body(images)
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class Blobs(Simple):
    """25 images: the last batch of an epoch has one, so that other ranks have none."""

    def __init__(self, recomputes: bool = False) -> None:
        self.recomputes = recomputes

    def data(self) -> Any:
        images = torch.randn(25, 1, 7, 7, generator=torch.Generator().manual_seed(1))
        rows: Any = [(image, number % 3) for number, image in enumerate(images)]
        return rows, rows[:5]

    def model(self) -> nn.Module:
        net = Net()
        net.recomputes = self.recomputes
        return net

    def row_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plain() -> tuple[dict[str, Tensor], Tensor]:
    """Train in plain PyTorch on whole global batches; return a checkpoint's tensors, and the first loss."""
    config, task = load_config(None, CONFIG), Blobs()
    data = task.prepare(config)
    torch.manual_seed(config.seed)
    model, plan, losses = task.model(), training_plan(config, data.train), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.0, foreach=False)
    for number in range(STEPS):
        epoch, step = divmod(number, plan.steps)
        loss = task.row_loss(model, data.train.batch(plan.rows(epoch, step))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return state_of(model, optimizer), torch.stack(losses)


def run(out: Path, task: Any = None, **changes: Any) -> dict[str, Tensor]:
    train(RunConfig(**CONFIG | {"out": str(out)} | changes), task or Blobs())
    return dict(read_tensors(max((out / "checkpoints").iterdir())))


@pytest.mark.parametrize("size", [1, 2, 8])
def test_micro_batches_change_nothing(size: int, tmp_path: Path) -> None:
    assert apart(run(tmp_path / "run", micro_batch_size=size), plain()[0])[0] <= 1e-6


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp", "distcore-fsdp", "distcore-mesh", "distcore-accelerate", "distcore-deepspeed")
@pytest.mark.parametrize(
    ("strategy", "options", "changes"),
    [
        ("ddp", {}, {}),
        ("ddp", {}, {"micro_batch_size": 1}),
        ("ddp", {}, {"compile": "on"}),
        ("fsdp", {}, {}),
        ("fsdp", {"sharding": "grad"}, {}),
        ("mesh", {"shard": 2}, {}),
        ("accelerate", {}, {}),
        ("deepspeed", {"stage": 1}, {}),
        ("deepspeed", {"stage": 3}, {}),
    ],
)
def test_ranks_change_nothing(strategy: str, options: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    changed = {"strategy": strategy, "strategy_options": options, "nproc": 2} | changes
    assert apart(run(tmp_path / "run", **changed), plain()[0]) <= (5e-6, "")


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp")
def test_recomputation_counts_no_row_twice(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", Blobs(recomputes=True), strategy="ddp", nproc=2)
    expected = {name: value for name, value in plain()[0].items() if "num_batches" not in name}
    assert apart(ended, expected)[0] <= 1e-6

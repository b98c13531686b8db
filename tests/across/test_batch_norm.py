"""Batch normalization over the global batch: training equals plain PyTorch with whole batches,
however it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcore import ConfigError, RunConfig, Simple, TaskError, load_config, train
from distcore.checkpoint import read_tensors
from distcore.plugin.batching.sampling import training_plan
from distcore.testing.reference import largest_difference, state_of

STEPS = 6
CONFIG: dict[str, Any] = {
    "lr": 1e-2,
    "max_steps": STEPS,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "device": "cpu",
    "log_every": 1,
    "optimizer": {"eps": 1e-2, "weight_decay": 0.0},
    "extensions": {"progress": False},
    "checkpoints": {"best": None},
    "schedule": {"name": "constant"},
    "clip": {"norm": None},
    "log_level": "error",
}


class Net(nn.Module):
    tp_plan: ClassVar = {"head": "colwise_gather_output"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False)
        self.norm, self.other, self.head = (
            nn.BatchNorm2d(4),
            nn.BatchNorm2d(4, affine=False),
            nn.Linear(4, 4),
        )
        self.recomputes = False

    def body(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.other(self.second(self.norm(self.first(images)).relu())).relu()
        return hidden

    def forward(self, images: Tensor) -> Tensor:
        hidden = (
            checkpoint(self.body, images, use_reentrant=False)
            if self.recomputes
            else self.body(images)
        )
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


class WholeBlobs(Blobs):
    def embed(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        logits: Tensor = model(batch[0])
        return {"logits": logits, "loss": F.cross_entropy(logits, batch[1], reduction="none")}

    def batch_loss(self, embeddings: dict[str, Tensor], rows: Tensor) -> Tensor:
        return embeddings["loss"].mean() + embeddings["logits"].mean(0).square().sum()


def plain(task: Any = None) -> dict[str, Tensor]:
    """Train in plain PyTorch on whole global batches; return a checkpoint's tensors."""
    config, task = load_config(None, CONFIG), task or Blobs()
    data = task.prepare(config)
    torch.manual_seed(config.seed)
    model, plan = task.model(), training_plan(config, data.train)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.0, foreach=False
    )
    for number in range(STEPS):
        epoch, step = divmod(number, plan.steps)
        loss = task.row_loss(model, data.train.batch(plan.rows(epoch, step))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state_of(model, optimizer)


def run(out: Path, task: Any = None, **changes: Any) -> dict[str, Tensor]:
    train(RunConfig(**CONFIG | {"out": str(out)} | changes), task or Blobs())
    return dict(read_tensors(max((out / "checkpoints").iterdir())))


@pytest.fixture
def traced() -> Iterator[None]:
    """Trace what is compiled and its gradients, and write no C++, which takes a core for minutes
    and is the same for all models.
    """
    torch.compiler.reset()
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        yield


@pytest.mark.needs("distcore-tasks")
@pytest.mark.parametrize("size", [1, 2, 8])
def test_micro_batches_change_nothing(size: int, tmp_path: Path) -> None:
    assert largest_difference(run(tmp_path / "run", micro_batch_size=size), plain())[0] <= 1e-6


@pytest.mark.ranks
@pytest.mark.usefixtures("traced")
@pytest.mark.needs(
    "distcore-tasks",
    "distcore-ddp",
    "distcore-fsdp",
    "distcore-mesh",
    "distcore-accelerate",
    "distcore-deepspeed",
)
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
def test_ranks_change_nothing(
    strategy: str, options: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    changed = {"strategy": strategy, "strategy_options": options, "nproc": 2} | changes
    assert largest_difference(run(tmp_path / "run", **changed), plain())[0] <= 1e-6


class LastAlone(Blobs):
    """One value of each channel in the last step of an epoch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(49, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


@pytest.mark.ranks
@pytest.mark.needs("distcore-tasks", "distcore-ddp")
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2)])
def test_a_step_of_one_row_is_refused(strategy: str, ranks: int, tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"batch_norm: a step has one row .*: choose another --?global.batch.size"
    ):
        run(tmp_path / "run", LastAlone(), strategy=strategy, nproc=ranks)


@pytest.mark.ranks
@pytest.mark.needs("distcore-tasks", "distcore-ddp")
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2)])
def test_recomputation_counts_no_row_twice(strategy: str, ranks: int, tmp_path: Path) -> None:
    ended = run(tmp_path / "run", Blobs(recomputes=True), strategy=strategy, nproc=ranks)
    assert largest_difference(ended, plain())[0] <= 1e-6


@pytest.mark.needs("distcore-tasks")
def test_without_the_extension_a_recomputed_micro_batch_counts_once(tmp_path: Path) -> None:
    off = {"progress": False, "batch_norm": False}
    once, again = (
        run(
            tmp_path / str(recomputes),
            Blobs(recomputes=recomputes),
            extensions=off,
            global_batch_size=5,
            micro_batch_size=5,
        )
        for recomputes in (False, True)
    )
    assert largest_difference(again, once)[0] == 0


class WithoutStatistics(Blobs):
    """Layers that normalize by a batch alone, in evaluation, too."""

    def model(self) -> nn.Module:
        net = Net()
        net.norm = nn.BatchNorm2d(4, track_running_stats=False)
        # one that is told so later keeps the statistics that it has, and evaluates by them
        net.other.track_running_stats = False
        return net


@pytest.mark.ranks
@pytest.mark.needs("distcore-tasks", "distcore-ddp")
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2)])
def test_layers_without_running_statistics_count_the_rows_of_all_ranks(
    strategy: str, ranks: int, tmp_path: Path
) -> None:
    ended = run(tmp_path / "run", WithoutStatistics(), strategy=strategy, nproc=ranks)
    expected = plain(WithoutStatistics())
    assert "model/norm.running_mean" not in expected
    assert largest_difference(ended, expected)[0] <= 1e-6


@pytest.mark.needs("distcore-tasks")
def test_metrics_without_running_statistics_are_said_to_depend_on_micro_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "distcore"):
        run(tmp_path / "run", WithoutStatistics(), log_level="info")
    assert [line for line in caplog.messages if line.startswith("note:")] == [
        "note:   batch normalization without running statistics mixes the rows of a micro-batch in"
        " evaluation, too: metrics depend on ranks and micro-batches"
    ]


class OneLeft(LastAlone):
    """An evaluation of five rows, by layers without statistics."""

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(4, track_running_stats=False)
        return nn.Sequential(nn.Flatten(), nn.Linear(49, 4), norm, nn.Linear(4, 4))


@pytest.mark.needs("distcore-tasks")
def test_an_evaluation_of_one_row_without_running_statistics_is_refused(tmp_path: Path) -> None:
    line = "a micro-batch of an evaluation has one row, .*: choose another --?micro.batch.size"
    with pytest.raises(TaskError, match=line):
        run(tmp_path / "run", OneLeft(), max_steps=2)


class FrozenBody(Blobs):
    """A task that freezes convolutions and normalization."""

    def model(self) -> nn.Module:
        net = Net()
        # one without weights is of the whole net, of which the head is trained
        net.other = nn.BatchNorm2d(4)
        net.requires_grad_(False)
        net.get_submodule("head").requires_grad_(True)
        return net


@pytest.mark.needs("distcore-tasks")
def test_frozen_statistics_stay_are_said_and_join_no_micro_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "distcore"):
        ended = run(tmp_path / "run", FrozenBody(), log_level="info")
    assert not int(ended["model/norm.num_batches_tracked"])
    line = (
        "note:   all normalizations with running statistics are frozen: these stay, and normalize"
        " the rows"
    )
    assert [
        message
        for message in caplog.messages
        if "normalization" in message or "batch_norm" in message
    ] == [line]


@pytest.mark.ranks
@pytest.mark.needs("distcore-tasks", "distcore-ddp", "distcore-fsdp")
def test_a_loss_over_the_global_batch_reads_one_statistic(tmp_path: Path) -> None:
    single, ddp = (
        run(tmp_path / name, WholeBlobs(), strategy=name, nproc=ranks)
        for name, ranks in (("single", 1), ("ddp", 2))
    )
    assert largest_difference(ddp, single)[0] <= 1e-6


@pytest.mark.ranks
@pytest.mark.needs("distcore-tasks", "distcore-ddp")
def test_without_the_extension_ranks_have_statistics_of_their_own(tmp_path: Path) -> None:
    ended = run(
        tmp_path / "run",
        strategy="ddp",
        nproc=2,
        extensions={"progress": False, "batch_norm": False},
    )
    assert largest_difference(ended, plain())[0] > 1e-3


@pytest.mark.needs("distcore-tasks")
def test_a_line_says_that_rows_are_computed_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "distcore"):
        run(tmp_path / "run", log_level="info")
    assert (
        "batch_norm: statistics over all rows of a step; a rank computes its 8 rows at once"
        in caplog.messages
    )
    assert not [line for line in caplog.messages if line.startswith("note:")]


@pytest.mark.ranks
@pytest.mark.needs("distcore-tasks", "distcore-mesh")
def test_a_strategy_that_cannot_is_refused_unless_it_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layout: dict[str, Any] = {
        "strategy": "mesh",
        "strategy_options": {"tp": 2},
        "nproc": 2,
        "log_level": "info",
    }
    with pytest.raises(
        ConfigError, match=r"'mesh' cannot compute .*: --set extensions.batch_norm=false$"
    ):
        run(tmp_path / "run", **layout)
    run(tmp_path / "run", **layout, extensions={"progress": False, "batch_norm": False})
    assert "note:   batch normalization mixes the rows of a micro-batch" in capfd.readouterr().err


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class ActivatedBlobs(Blobs):
    def model(self) -> nn.Module:
        net = Net()
        net.norm = Activated(4)
        net.other = Activated(4)
        return net


@pytest.mark.needs("distcore-tasks")
def test_a_layer_with_a_forward_of_its_own_is_left_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "distcore"):
        run(tmp_path / "run", ActivatedBlobs(), log_level="info")
    assert [line for line in caplog.messages if "batch normalization mixes the rows" in line]
    assert not [line for line in caplog.messages if line.startswith("batch_norm:")]


@pytest.mark.needs("distcore-tasks")
def test_weights_in_16_bits_beside_statistics_in_fp32_normalize() -> None:
    """An engine may cast the parameters alone, which torch's own layer does not take."""
    from distcore_tasks.batch_norm import GlobalBatchNorm

    torch.manual_seed(0)
    images = torch.randn(6, 4, 3, 3).bfloat16()
    right: Any = nn.BatchNorm2d(4)
    layer: Any = nn.BatchNorm2d(4)
    layer.to(torch.bfloat16)
    layer.running_mean, layer.running_var = torch.zeros(4), torch.ones(4)
    layer.__class__ = type("GlobalBatchNorm2d", (GlobalBatchNorm, nn.BatchNorm2d), {"run": None})
    for training in (True, False):
        expected, got = right.train(training)(images.float()), layer.train(training)(images)
        assert got.dtype == torch.bfloat16
        assert torch.allclose(got.float(), expected, atol=2e-2)
        assert torch.allclose(layer.running_mean, right.running_mean, atol=1e-6)
    assert layer.running_mean.dtype == torch.float32

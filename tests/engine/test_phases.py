"""Tasks that train in phases: a GAN against plain PyTorch, whole runs, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore import (
    Capabilities,
    ConfigError,
    Datasets,
    Phase,
    RunConfig,
    TaskError,
    load_config,
    registry,
    train,
)
from distcore.checkpoint import read_tensors
from distcore.model.optim import optimizer_factory
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.task.bound import BoundTask
from distcore.resolve import strategies
from distcore.resolve.check_capabilities import check_task
from distcore.testing.problem import Classifier, Problem
from distcore.testing.reference import largest_difference, state_of
from distcore.testing.variants import Phased, WholeBatch

CONFIG: dict[str, Any] = {
    "lr": 1e-2,
    "max_steps": 6,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "device": "cpu",
    "log_every": 1,
    "optimizer": {"eps": 1e-2},
    "extensions": {"progress": False},
    "checkpoints": {"best": None},
    "schedule": {"name": "constant"},
    "clip": {"norm": 0.5},
}
SLOWER = {"lr_scale": 0.25, "betas": (0.5, 0.99)}


def run(out: Path, task: Any, **changes: Any) -> list[dict[str, Any]]:
    """The log lines of a run."""
    train(RunConfig(**CONFIG | {"out": str(out)} | changes), task)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def last(out: Path) -> Path:
    return max((out / "checkpoints").iterdir())


class Pairs:
    """Real points and the noise of false ones; implements ``distcore.Dataset``."""

    def __init__(self, rows: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.lengths = self.items = np.ones(rows, dtype=np.int64)
        self.real = random.normal(2, 0.5, (rows, 3)).astype(np.float32)
        self.noise = random.normal(0, 1, (rows, 2)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return {
            "real": torch.from_numpy(self.real[indices]),
            "noise": torch.from_numpy(self.noise[indices]),
        }


class Players(nn.Module):
    """A generator and a discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        """The discriminator's logits of false and real points, one column each."""
        return torch.cat(
            [self.discriminator(self.generator(noise)), self.discriminator(real)], dim=1
        )


def of_discriminator(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["noise"], batch["real"])
    wanted = torch.tensor([0.0, 1.0], device=logits.device).expand_as(logits)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")


def of_generator(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["noise"], batch["real"])[:, 0]
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits), reduction="sum")


@dataclass(frozen=True)
class GAN:
    """A generative adversarial network of points."""

    def prepare(self, config: RunConfig) -> Datasets:
        held_out = Pairs(9, seed=1)
        return Datasets(train=Pairs(29, seed=0), evaluation=held_out, test=held_out)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return Players()

    def phases(self) -> dict[str, Phase]:
        return {
            "discriminator": Phase(r"^discriminator\.", of_discriminator),
            "generator": Phase(r"^generator\.", of_generator, SLOWER),
        }

    def row_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["noise"], batch["real"])[:, 0]
        return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits), reduction="none")


def plain(config: RunConfig) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The loop of every tutorial, with two optimizers: losses of both players, and the
    tensors of a checkpoint.
    """
    torch.manual_seed(config.seed)
    model, data = Players(), Pairs(29, seed=0)
    shared: dict[str, Any] = {"eps": 1e-2, "foreach": False}

    def adamw(player: nn.Module, **own: Any) -> torch.optim.AdamW:
        named = list(player.named_parameters())
        groups = [
            {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.01},
            {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, **shared | own)

    optimizers = (
        adamw(model.discriminator, lr=1e-2),
        adamw(model.generator, lr=0.25e-2, betas=(0.5, 0.99)),
    )
    losses: tuple[list[float], list[float]] = ([], [])
    plan = training_plan(config, data)
    batches = [plan.rows(epoch, step) for epoch in range(2) for step in range(plan.steps)][:6]
    for rows in batches:
        batch = data.batch(rows)
        for optimizer, loss_of, said in zip(
            optimizers, (of_discriminator, of_generator), losses, strict=True
        ):
            model.zero_grad()
            loss = loss_of(model, batch) / len(rows)
            loss.backward()
            nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], 0.5
            )
            optimizer.step()
            said.append(loss.item())
    return *losses, state_of(model, optimizers[0]) | state_of(model, optimizers[1])


def compare_with_plain(out: Path, **changes: Any) -> None:
    lines = run(out, GAN(), **changes)
    discriminator, generator, state = plain(load_config(None, CONFIG))
    assert [line["train/discriminator"] for line in lines] == pytest.approx(discriminator, rel=1e-5)
    assert [line["train/generator"] for line in lines] == pytest.approx(generator, rel=1e-5)
    assert [line["train/loss"] for line in lines] == pytest.approx(
        np.add(discriminator, generator), rel=1e-5
    )
    assert largest_difference(read_tensors(last(out)), state)[0] <= 1e-5


@pytest.mark.parametrize("size", [1, 8])
def test_a_gan_is_that_of_plain_pytorch(size: int, tmp_path: Path) -> None:
    compare_with_plain(tmp_path / "run", micro_batch_size=size)


@pytest.mark.needs(
    "distcore-ddp", "distcore-fsdp", "distcore-mesh", "distcore-horovod", "distcore-accelerate"
)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {"find_unused": True}),
        ("fsdp", {}),
        ("mesh", {"shard": 2}),
        ("horovod", {"find_unused": True}),
        ("accelerate", {"find_unused": True}),
    ],
)
def test_a_gan_is_that_of_plain_pytorch_over_two_ranks(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    compare_with_plain(tmp_path / "run", strategy=strategy, strategy_options=options, nproc=2)


@pytest.mark.programs
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    run(tmp_path / "whole", Phased(dropout=0.2))
    run(tmp_path / "cut", Phased(dropout=0.2), save_every=3)
    run(
        tmp_path / "on", Phased(dropout=0.2), resume=str(tmp_path / "cut/checkpoints/step-00000003")
    )
    whole, on = read_tensors(last(tmp_path / "whole")), read_tensors(last(tmp_path / "on"))
    assert whole.keys() == on.keys()
    assert all(torch.equal(value, on[name]) for name, value in whole.items())


def lacking(strategy: str, **options: Any) -> None:
    config = load_config(None, {"strategy": strategy, "strategy_options": options})
    check_task(config, strategies.load_strategy(config).capabilities, BoundTask.wrap(GAN()))


@pytest.mark.needs(
    "distcore-ddp", "distcore-fsdp", "distcore-deepspeed", "distcore-mesh", "distcore-horovod"
)
@pytest.mark.parametrize(
    ("strategy", "options", "why"),
    [
        *(("deepspeed", {"stage": stage}, "gets a zero gradient.*; .*fsdp") for stage in range(4)),
        ("ddp", {}, "needs strategy_options.find_unused=true"),
        ("horovod", {}, "needs strategy_options.find_unused=true"),
        ("mesh", {"pp": 2}, "each stage of a pipeline"),
    ],
)
def test_a_strategy_that_steps_the_idle_part_is_refused(
    strategy: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"trains in phases, and strategy '{strategy}' .*cannot: .*{why}"
    ):
        lacking(strategy, **options)


@pytest.mark.needs("distcore-ddp", "distcore-fsdp", "distcore-mesh")
def test_strategies_that_cannot_train_phases_refuse_them_and_each_evaluates_them() -> None:
    lacking("ddp", find_unused=True)
    lacking("fsdp")
    lacking("mesh", tp=2)
    config = load_config(None, {"strategy": "deepspeed"})
    check_task(config, Capabilities(spec_version=3), BoundTask.wrap(GAN()), training=False)


def phased(*phases: Phase, **named: Any) -> Any:
    given = {f"phase {number}": phase for number, phase in enumerate(phases)} | named
    return type("Given", (Problem,), {"phases": lambda self: given})()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]), batch["labels"], reduction="sum")


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (phased(), r"phases\(\) returned none"),
        (
            phased(wrong=r"^head"),
            r"phases\(\) returned \{'wrong': '\^head'\}; expected a dict of distcore.Phase",
        ),
        (
            phased(Phase("head", loss)),
            r"phases\(\) has no phase for the parameter 'embedding.weight'; add it",
        ),
        (
            phased(Phase("", loss), Phase("tail", loss)),
            r"\['phase 1'\].match = 'tail': matches no trained param",
        ),
        (
            phased(Phase("", loss, {"beta": 1})),
            r"'adamw' has no setting 'beta' .*\(did you mean 'betas'\?\) \(it has",
        ),
        (phased(loss=Phase("", loss)), r"logs: 'loss' is the name of two values of a log line"),
    ],
)
def test_wrong_phases_are_refused(task: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=line):
        run(tmp_path / "run", task)


def test_phases_beside_a_loss_over_the_global_batch_are_refused(tmp_path: Path) -> None:
    task = type("Both", (WholeBatch,), {"phases": Phased.phases, "deceive": Phased.deceive})()
    with pytest.raises(TaskError, match=r"task Both: has both phases\(\) and batch_loss\(\)"):
        run(tmp_path / "run", task)


def test_the_users_groups_come_before_the_settings_of_phases() -> None:
    config = load_config(
        None, CONFIG | {"optimizer.groups": [{"match": r"head\.weight", "lr": 0.5}]}
    )
    phases = Phased().phases()
    module = Classifier()
    groups = optimizer_factory(config, phases)(module).param_groups
    of = {id(p): group for group in groups for p in group["params"]}
    assert of[id(module.head.weight)]["lr"] == 0.5
    assert of[id(module.head.bias)]["lr"] == pytest.approx(0.5e-2)
    assert of[id(module.head.weight)]["betas"] == (0.5, 0.9)
    assert of[id(module.head.weight)]["weight_decay"] == 0.3
    assert of[id(module.embedding.weight)]["lr"] == groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("name", sorted(registry.offers("optimizers")))
def test_every_optimizer_leaves_what_has_no_gradient(name: str) -> None:
    torch.manual_seed(0)
    module = Classifier()
    config = load_config(None, CONFIG | {"optimizer": {"name": name}})
    optimizer = optimizer_factory(config)(module)
    before = {key: value.clone() for key, value in module.named_parameters()}
    for key, parameter in module.named_parameters():
        if key.startswith(("head.", "blocks.1.")):
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for key, parameter in module.named_parameters():
        assert torch.equal(parameter, before[key]) is not key.startswith(("head.", "blocks.1.")), (
            key
        )

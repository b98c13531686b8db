"""Whole runs on two ranks: optimizers and schedulers in their combinations, resuming,
the run folder, silence.
"""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distcore import Progress, RankInfo, RunConfig, Simple, launch, load_config, train
from distcore.engine.build import build_run
from distcore.engine.loop import steps
from distcore.errors import CheckpointError, RankError, StrategyError
from distcore.plugin.strategy.hooks import Hooks
from distcore.rank_environment import join
from distcore.resolve import strategies
from distcore.testing.problem import Problem
from distcore_deepspeed import checkpoint

pytestmark = pytest.mark.ranks

import_module("transformers.optimization")  # once, here, rather than in every rank that is forked

JOB = {
    "strategy": "deepspeed",
    "device": "cpu",
    "nproc": 2,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "lr": 0.01,
    "max_steps": 6,
    "log_every": 1,
    "schedule.warmup_steps": 2,
    "extensions": {"progress": False, "metrics": True},
}
CONSTANT: dict[str, Any] = {"schedule.name": "constant", "schedule.warmup_steps": 0}


def config(out: Path, options: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    return load_config(None, JOB | {"out": str(out), "strategy_options": options or {}} | changes)


def lines(out: Path, options: dict[str, Any] | None = None, **changes: Any) -> list[dict[str, Any]]:
    """Train on two ranks; the steps of metrics.jsonl."""
    settings = config(out, options, **changes)
    launch(train, settings, Problem(), nproc=int(settings.nproc))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in records if "train/loss" in line]


def column(records: list[dict[str, Any]], name: str) -> list[float]:
    return [line[f"train/{name}"] for line in records]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same job in one process, at a constant rate."""
    out = tmp_path_factory.mktemp("alone") / "run"
    return lines(out, {}, strategy="single", nproc=1, **CONSTANT)


def test_our_optimizer_and_our_schedule(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    records = lines(tmp_path / "run", {}, **CONSTANT)
    assert column(records, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)
    assert column(records, "grad_norm") == pytest.approx(column(alone, "grad_norm"), rel=1e-5)


def test_deepspeeds_optimizer_at_constant_rates(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer.groups": [{"match": "head", "lr": 0.1}]} | CONSTANT
    expected = lines(tmp_path / "alone", strategy="single", nproc=1, **changes)
    records = lines(
        tmp_path / "run", {"stage": 3}, **changes | {"optimizer.name": "deepspeed-adamw"}
    )
    assert column(records, "loss") == pytest.approx(column(expected, "loss"), rel=1e-5)


OTHER_OPTIMIZER = """
from dataclasses import dataclass, replace
import torch
from distcore import hookimpl

@dataclass
class Other:
    @hookimpl(wrapper=True)
    def wrap_model(self):
        prepared = yield
        return replace(prepared, optimizer=torch.optim.SGD(prepared.model.parameters(), lr=0.5))
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_the_engine_would_not_step_is_refused(tmp_path: Path, stage: int) -> None:
    (tmp_path / "mine.py").write_text(OTHER_OPTIMIZER)
    extensions = {"progress": False, f"{tmp_path / 'mine.py'}:Other": True}
    with pytest.raises(
        StrategyError, match=r"mine.py:Other': replaced the optimizer .* 'deepspeed' steps its own"
    ):
        lines(tmp_path / "run", {"stage": stage}, extensions=extensions)


def test_our_optimizer_and_deepspeeds_scheduler(tmp_path: Path) -> None:
    records = lines(
        tmp_path / "run", {"scheduler": "WarmupLR", "scheduler_params": {"warmup_type": "linear"}}
    )
    assert column(records, "lr") == pytest.approx([0, 0.005, 0.01, 0.01, 0.01, 0.01])


def test_deepspeeds_optimizer_and_scheduler_from_its_own_json(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    scheduler = {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(names, "auto") | {"warmup_type": "linear"},
    }
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    file.write_text(
        json.dumps(
            {"optimizer": optimizer, "scheduler": scheduler, "zero_optimization": {"stage": 1}}
        )
    )
    records = lines(tmp_path / "run", {"config": str(file)})
    assert column(records, "lr") == pytest.approx([0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    resolved = json.loads((tmp_path / "run" / "deepspeed.json").read_text())
    assert resolved["scheduler"]["params"]["total_num_steps"] == 6
    assert resolved["optimizer"]["params"]["torch_adam"] is True


@pytest.mark.parametrize("name", ["OneCycle", "LRRangeTest"])
def test_the_other_schedulers_change_the_rate(tmp_path: Path, name: str) -> None:
    params = {
        "OneCycle": {"cycle_first_step_size": 3},
        "LRRangeTest": {"lr_range_test_step_size": 2},
    }[name]
    rates = column(lines(tmp_path / "run", {"scheduler": name, "scheduler_params": params}), "lr")
    assert len(set(rates)) > 3


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])  # Lion counts no steps
def test_a_scheduler_of_deepspeeds_goes_on_where_it_was(tmp_path: Path, optimizer: str) -> None:
    options: dict[str, Any] = {"stage": 1, "scheduler": "WarmupDecayLR"}
    named: dict[str, Any] = {"optimizer.name": optimizer}
    whole = lines(tmp_path / "whole", options, save_every=3, **named)
    (tmp_path / "half").mkdir()
    half = str(tmp_path / "whole" / "checkpoints" / "step-00000003")
    records = lines(tmp_path / "half", options, resume=half, **named)
    assert column(records, "lr") == column(whole, "lr")[3:]
    assert column(records, "loss") == column(whole, "loss")[3:]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_trains_and_resumes_bit_for_bit(
    tmp_path: Path, stage: int, alone: list[dict[str, Any]]
) -> None:
    options = {"stage": stage}
    changes = {"precision": "bf16"} | CONSTANT
    whole = lines(tmp_path / "whole", options, save_every=3, **changes)
    assert column(whole, "loss") == pytest.approx(column(alone, "loss"), rel=2e-2)
    again = lines(
        tmp_path / "half",
        options,
        resume=str(tmp_path / "whole/checkpoints/step-00000003"),
        **changes,
    )
    assert column(again, "loss") == column(whole, "loss")[3:]


class Line(Simple):
    """The README's first task: its rows are fp32, its model is linear."""

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        x = torch.linspace(-1, 1, 64)[:, None]
        return TensorDataset(x, 3 * x), TensorDataset(x[::10], 3 * x[::10])

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def row_loss(self, model: nn.Module, batch: Any) -> Tensor:
        losses: Tensor = (model(batch[0]) - batch[1]).square()[:, 0]
        return losses


def test_fp32_rows_train_a_model_of_16_bits_as_under_autocast(tmp_path: Path) -> None:
    losses = []
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "single": (1, {}),
        "deepspeed": (2, {"stage": 3}),
    }
    for name, (nproc, options) in ways.items():
        settings = config(
            tmp_path / name, options, strategy=name, nproc=nproc, precision="bf16", **CONSTANT
        )
        launch(train, settings, Line(), nproc=nproc)
        records = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append([record["train/loss"] for record in records if "train/loss" in record])
    alone, ranks = losses
    assert ranks == pytest.approx(alone, rel=2e-2)


def test_a_run_prints_nothing_of_deepspeed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR", logger="distcore")  # ranks inherit the logger
    lines(tmp_path / "run", {"stage": 3}, log_level="error")
    lines(tmp_path / "bf16", {"stage": 1}, log_level="error", precision="bf16")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


class Stuck(Problem):
    """A task of which rank 1 comes to a stop."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if os.environ["RANK"] == "1":
            time.sleep(60)
        return super().loss(model, batch)


@pytest.mark.parametrize(
    "stage", [0, 3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))]
)
def test_a_rank_that_hangs_ends_the_job(tmp_path: Path, stage: int) -> None:
    settings = config(tmp_path / "run", {"stage": stage}, timeout=5)
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 of 2 failed.*Timed out"):
        launch(train, settings, Stuck(), nproc=2)
    assert time.monotonic() - started < 40


def gathers(settings: RunConfig, evaluations: int) -> list[int]:
    """On each rank: evaluate a batch first, if asked; return how often each step then gathers."""
    task = Problem()
    hooks = Hooks(settings.strategy, strategies.load_strategy(settings).plugin)
    world, data = hooks.setup(settings, join() or RankInfo()), task.prepare(settings)
    run = build_run(settings, hooks, world, task, data)
    for _ in range(evaluations):
        with torch.no_grad():
            run.model(data.train.batch(np.arange(2))["tokens"])
    counts = []
    loop = steps(run, hooks, task, data.train, Progress())
    for _ in range(int(settings.max_steps or 0)):
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            next(loop)
        counts.append(sum("allgather" in event.name for event in profile.function_events or []))
    hooks.teardown(world)
    return counts


def test_an_evaluation_before_the_first_step_costs_no_gathers_later(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", {"stage": 3, "stage3_param_persistence_threshold": 0})
    never, before = (launch(gathers, settings, evaluations, nproc=2)[0] for evaluations in (0, 2))
    assert 0 < before[-1] == never[-1] < never[0], (
        "a step that knows the order gathers layers together"
    )


def test_a_save_of_stage_3_that_has_another_parameters_weights_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank compares what it saves, of the optimizer's buffers, with the partitions
    that forward passes gather.
    """
    where = checkpoint._partition_of

    def of_the_next(optimizer: Any, parameter: Any) -> tuple[int, int, int]:
        alike = [
            one
            for group in optimizer.fp16_groups
            for one in group
            if one.ds_numel == parameter.ds_numel
        ]
        place = next(number for number, one in enumerate(alike) if one is parameter)
        other = alike[(place + 1) % len(alike)]
        return where(optimizer, other)[0], *where(optimizer, parameter)[1:]

    monkeypatch.setattr(checkpoint, "_partition_of", of_the_next)
    settings = config(tmp_path / "run", {"stage": 3}, max_steps=2, precision="bf16", prove="off")
    with pytest.raises(
        CheckpointError,
        match=r"'\S+': the weight that strategy 'deepspeed' saves is not the one that",
    ):
        launch(train, settings, Problem(), nproc=2)
    assert not (tmp_path / "run/checkpoints").exists()

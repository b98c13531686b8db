"""Horovod's buffer and traffic in a plan, its stand-in on tensors without ranks, and the
variables that it reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from distcore import Capabilities, Clip, Memory, Run, RunConfig

strategy = pytest.importorskip(
    "distcore_horovod.strategy",
    reason="needs Horovod: distcore-horovod build",
    exc_type=ImportError,
)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters())


def planned(ranks: int = 4, **options: Any) -> Memory:
    model = nn.Linear(10, 2, device="meta")
    return cast(
        "Memory", strategy.HorovodStrategy(**options).plan_memory(RunConfig(), model, ranks, adamw)
    )


def test_each_rank_holds_the_model_and_the_fusion_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    states = {"parameters": 88, "gradients": 88, "optimizer": 2 * 88 + 2 * 4}
    assert planned() == Memory(**states, buffers=128 * 2**20, sent=2 * 88 * 3 // 4)
    assert planned(ranks=1) == Memory(**states, sent=0)
    assert planned(compression="fp16", fusion_mb=0.5) == Memory(
        **states, buffers=2**19, sent=2 * 44 * 3 // 4
    )
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "7")
    assert planned().buffers == 7


def a_run(model: nn.Module, ranks: int) -> Run:
    world = SimpleNamespace(size=ranks, device=torch.device("cpu"), is_main=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return cast(
        "Run",
        SimpleNamespace(world=world, module=model, model=model, optimizer=optimizer, scaler=None),
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_stand_in_holds_a_buffer_if_there_are_peers(ranks: int) -> None:
    traced, model = strategy.HorovodStrategy(fusion_mb=1).traced(), nn.Linear(2, 2)
    assert traced.capabilities == Capabilities(spec_version=3, devices=frozenset({"cpu", "cuda"}))
    prepared = traced.wrap_model(a_run(model, ranks), model, None)
    assert (prepared.model, prepared.optimizer) == (model, None)
    assert traced.wrap_model(a_run(model, ranks), model, adamw).optimizer is not None
    assert (traced._buffer.nbytes if traced._buffer is not None else 0) == (
        2**20 if ranks > 1 else 0
    )


@pytest.mark.parametrize(("compression", "moved"), [("none", 1 + 2**-20), ("fp16", 1.0)])
def test_the_stand_in_sends_gradients_in_half_precision_if_asked(
    compression: str, moved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(1, 2, bias=True)
    model.weight.grad = torch.full((2, 1), 1 + 2**-20)  # the bias has none
    monkeypatch.setattr("distcore.defaults.step", lambda run, clip: "stepped")
    traced = strategy.HorovodStrategy(compression=compression).traced()
    assert traced.step(a_run(model, 2), Clip()) == "stepped"
    assert model.weight.grad.tolist() == [[moved], [moved]]
    assert model.bias.grad is None


@pytest.mark.parametrize(
    ("timeout", "warn", "end"), [(1, "1", "2"), (20, "10", "20"), (600, "60", "600")]
)
def test_a_stalled_collective_is_named_before_it_ends_the_run(
    timeout: int, warn: str, end: str
) -> None:
    variables = strategy.HorovodStrategy()._variables(RunConfig(timeout=timeout))
    assert variables["HOROVOD_STALL_CHECK_TIME_SECONDS"] == warn
    assert variables["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == end
    assert variables["HOROVOD_DISABLE_GROUP_FUSION"] == "1"
    assert not {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"} & variables.keys()


def test_options_become_horovods_variables() -> None:
    variables = strategy.HorovodStrategy(fusion_mb=1.5, cycle_ms=2.5)._variables(RunConfig())
    assert variables["HOROVOD_FUSION_THRESHOLD"] == str(3 * 2**19)
    assert variables["HOROVOD_CYCLE_TIME"] == "2.5"

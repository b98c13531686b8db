"""fp16 with DeepSpeed's dynamic loss scale. It refuses fp16 on a CPU; told that this one can,
it computes in it.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from distcore import launch, load_config, train
from distcore.checkpoint import Checkpoint
from distcore.testing.problem import Problem
from distcore_deepspeed.engine import LossScaleError, explain_overflow
from distcore_deepspeed.loss_scale import DynamicScale

import_module("transformers.optimization")  # once, here, rather than in every rank that is forked

JOB = {
    "device": "cpu",
    "precision": "fp16",
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "lr": 0.01,
    "log_every": 1,
    "max_steps": 8,
    "save_every": 1,
    "checkpoints.keep_last": 9,
    "schedule.name": "constant",
    "clip.norm": 1.0,
    "extensions": {"progress": False, "metrics": True},
}
OVERFLOWS = {"initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 2}


@pytest.fixture(autouse=True)
def _a_cpu_with_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda _: True)


def half(
    out: Path, strategy: str = "deepspeed", options: dict[str, Any] | None = None, **changes: Any
) -> list[float]:
    """Train in fp16; the losses of metrics.jsonl."""
    nproc = 1 if strategy == "single" else 2
    settings = {
        "strategy": strategy,
        "strategy_options": options or {},
        "nproc": nproc,
        "out": str(out),
    }
    launch(train, load_config(None, JOB | settings | changes), Problem(), nproc=nproc)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def scaler_at(out: Path, step: int) -> dict[str, Any]:
    small = Checkpoint(out / f"checkpoints/step-{step:08d}").job_state()
    return dict(small["scaler"])


def resumed_at(out: Path, step: int) -> str:
    return str(out / f"checkpoints/step-{step:08d}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    return half(tmp_path_factory.mktemp("alone"), "single")


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_in_fp16_equals_that_of_one_process(
    alone: list[float], tmp_path: Path, stage: int
) -> None:
    # no step overflows
    on_two_ranks = half(tmp_path / "ranks", options={"stage": stage, "initial_scale_power": 10})
    assert on_two_ranks == pytest.approx(alone, rel=2e-2)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [2, 3])
def test_a_scale_that_is_falling_goes_on_falling_after_a_resume(tmp_path: Path, stage: int) -> None:
    options = {"stage": stage} | OVERFLOWS
    whole = half(tmp_path / "whole", options=options)
    saved = scaler_at(tmp_path / "whole", 3)
    assert saved["scale"] < 2.0**20
    assert saved["hysteresis"] == 1, "the first overflow was to use one up"
    (tmp_path / "half").mkdir()
    again = half(tmp_path / "half", options=options, resume=resumed_at(tmp_path / "whole", 3))
    assert again == whole[3:]
    assert scaler_at(tmp_path / "half", 8) == scaler_at(tmp_path / "whole", 8)


@pytest.mark.ranks
def test_the_scale_goes_to_another_strategy_and_back(tmp_path: Path) -> None:
    half(tmp_path / "zero", options={"stage": 2} | OVERFLOWS, max_steps=4)
    last = scaler_at(tmp_path / "zero", 4)
    accepted: dict[str, Any] = {"resume_changed": ["total_steps"], "max_steps": 5}
    half(tmp_path / "single", "single", {}, resume=resumed_at(tmp_path / "zero", 4), **accepted)
    assert scaler_at(tmp_path / "single", 5)["scale"] in (last["scale"], last["scale"] / 2)
    accepted["max_steps"] = 6
    half(
        tmp_path / "back",
        "deepspeed",
        {"stage": 3},
        resume=resumed_at(tmp_path / "single", 5),
        **accepted,
    )
    assert scaler_at(tmp_path / "back", 6)["scale"] <= last["scale"]


@pytest.mark.ranks
def test_a_scale_at_its_minimum_ends_the_run_in_one_line(tmp_path: Path) -> None:
    options = {"stage": 2, "initial_scale_power": 20, "min_loss_scale": 2**20, "hysteresis": 1}
    with pytest.raises(
        LossScaleError,
        match=r"overflow at the smallest loss scale.*trained in bf16.*--precision bf16",
    ):
        half(tmp_path / "run", options=options)


def scaler(**changes: Any) -> DynamicLossScaler:
    settings: dict[str, Any] = {
        "scale_window": 3,
        "min_scale": 1,
        "delayed_shift": 2,
        "consecutive_hysteresis": False,
    }
    return DynamicLossScaler(2.0**10, **(settings | changes))


@pytest.mark.parametrize("good", range(8))
def test_a_restored_scaler_grows_when_the_first_would_have(good: int) -> None:
    first, second = scaler(), scaler()
    for _ in range(good):
        first.update_scale(False)
    DynamicScale(second).load_state_dict(DynamicScale(first).state_dict())
    for _ in range(9):
        first.update_scale(False)
        second.update_scale(False)
        assert first.cur_scale == second.cur_scale


@pytest.mark.parametrize("good", range(1, 8))
def test_torch_goes_on_with_deepspeeds_scale_and_deepspeed_with_torchs(good: int) -> None:
    zero, back = scaler(), scaler()
    for _ in range(good):
        zero.update_scale(False)
    torchs = torch.amp.GradScaler("cpu")
    state = DynamicScale(zero).state_dict()
    torchs.load_state_dict({key: state[key] for key in torchs.state_dict()})
    DynamicScale(back).load_state_dict(torchs.state_dict())
    for _ in range(7):
        zero.update_scale(False)
        back.update_scale(False)
        assert stepped(torchs) == zero.cur_scale == back.cur_scale


def stepped(grad_scaler: torch.amp.GradScaler) -> float:
    """Take a step that does not overflow."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    grad_scaler.scale(weight.sum()).backward()
    grad_scaler.step(optimizer)
    grad_scaler.update()
    return grad_scaler.get_scale()


def test_a_run_with_a_higher_minimum_keeps_to_it() -> None:
    careful = scaler(min_scale=2**12)
    DynamicScale(careful).load_state_dict(DynamicScale(scaler()).state_dict())
    assert careful.cur_scale == 2**12


def test_the_error_of_the_loss_scale_is_explained_and_no_other() -> None:
    last = DynamicLossScaler(
        1, scale_window=1000, min_scale=1, delayed_shift=1, consecutive_hysteresis=False
    )
    with pytest.raises(LossScaleError, match="trained in bf16"), explain_overflow():
        last.update_scale(True)
    with pytest.raises(ValueError, match="another"), explain_overflow():
        raise ValueError("another")

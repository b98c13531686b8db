"""DeepSpeed's dynamic loss scale under Accelerate: saved with a checkpoint and restored from it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from distcore import launch, load_config, train
from distcore.checkpoint import Checkpoint
from distcore.testing.problem import Problem
from distcore_deepspeed.engine import LossScaleError

pytestmark = pytest.mark.ranks

cpu = pytest.importorskip("deepspeed.accelerator.cpu_accelerator")
import_module("transformers.optimization")  # once, here, rather than in every rank that is forked

OVERFLOWS = {"initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 2}


@pytest.fixture(autouse=True)
def _a_cpu_with_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed refuses fp16 on most CPUs; told that this one can, it computes in it."""
    monkeypatch.setattr(cpu.CPU_Accelerator, "is_fp16_supported", lambda _: True)


def half(out: Path, scale: dict[str, int], **changes: Any) -> list[float]:
    """Train in fp16 on two ranks; the losses of metrics.jsonl."""
    settings: dict[str, Any] = {
        "strategy": "accelerate",
        "device": "cpu",
        "nproc": 2,
        "precision": "fp16",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "lr": 0.01,
        "log_every": 1,
        "max_steps": 8,
        "save_every": 1,
        "checkpoints.keep_last": 9,
        "schedule.name": "constant",
        "extensions": {"progress": False, "metrics": True},
        "out": str(out),
        "strategy_options": {"backend": "deepspeed", "deepspeed_config": {"fp16": scale}},
    }
    launch(train, load_config(None, settings | changes), Problem(), nproc=2)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in records if "train/loss" in line]


def scaler_at(out: Path, step: int) -> dict[str, Any]:
    return dict(Checkpoint(out / f"checkpoints/step-{step:08d}").job_state()["scaler"])


def test_a_scale_that_is_falling_goes_on_falling_after_a_resume(tmp_path: Path) -> None:
    whole = half(tmp_path / "whole", OVERFLOWS)
    assert scaler_at(tmp_path / "whole", 3)["scale"] < 2.0**20
    (tmp_path / "half").mkdir()
    again = half(
        tmp_path / "half", OVERFLOWS, resume=str(tmp_path / "whole/checkpoints/step-00000003")
    )
    assert again == whole[3:]
    assert scaler_at(tmp_path / "half", 8) == scaler_at(tmp_path / "whole", 8)


def test_a_scale_at_its_minimum_ends_the_run_in_one_line(tmp_path: Path) -> None:
    lowest = {"initial_scale_power": 20, "min_loss_scale": 2**20, "hysteresis": 1}
    with pytest.raises(
        LossScaleError,
        match=r"overflow at the smallest loss scale.*trained in bf16.*--precision bf16",
    ):
        half(tmp_path / "run", lowest)

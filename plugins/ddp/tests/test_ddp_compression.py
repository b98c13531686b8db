"""Gradients are sent in fp32 unless the user allows half precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distcore import RunConfig, launch, train
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.distance import difference
from distcore.testing.problem import Problem


def gradient(out: Path, **changes: Any) -> dict[str, Any]:
    """Return the weights after one step of SGD at a rate so large that they are
    all but the gradient.
    """
    settings: dict[str, Any] = {
        "device": "cpu",
        "max_steps": 1,
        "global_batch_size": 8,
        "lr": 100.0,
        "optimizer": {"name": "sgd"},
    }
    settings |= {
        "schedule": {"name": "constant"},
        "clip": {"norm": None},
        "extensions": {"progress": False},
    }
    train(RunConfig.model_validate(settings | {"out": str(out)} | changes), Problem(rows=16))
    saved = Checkpoint(out / "checkpoints/step-00000001")
    return {name: saved[name] for name in saved if name.startswith("model/")}


def each(out: Path) -> dict[str, dict[str, Any]]:
    options = {"default": {}, "bf16": {"compression": "bf16"}, "fp16": {"compression": "fp16"}}
    return {
        name: gradient(out / name, strategy="ddp", strategy_options=option)
        for name, option in options.items()
    }


@pytest.mark.ranks
def test_gradients_are_rounded_only_where_the_user_allows_it(tmp_path: Path) -> None:
    alone = gradient(tmp_path / "single", strategy="single")
    trained = launch(each, tmp_path, nproc=2)[0]
    errors = {
        kind: max(difference(weights[name], alone[name]).relative for name in alone)
        for kind, weights in trained.items()
    }
    assert errors["default"] < 1e-6
    assert 1e-4 < errors["bf16"] < 2e-2
    assert 1e-5 < errors["fp16"] < 2e-3

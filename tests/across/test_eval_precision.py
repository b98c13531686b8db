"""An evaluation in a precision of its own, under each strategy whose forward
passes the core casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from distcore import Datasets, Direction, RunConfig, train
from distcore.testing.problem import Problem

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "horovod": ("horovod", {}),
    "accelerate": ("accelerate", {}),
    "shard": ("mesh", {"shard": 2}),
    "tp": ("mesh", {"tp": 2}),
    "pp": ("mesh", {"pp": 2}),
}


@dataclass(frozen=True, kw_only=True)
class Seen(Problem):
    """Reports the part of rows whose logits were computed in bf16, and their mean loss."""

    metrics: ClassVar[Mapping[str, Direction]] = {"loss": "min", "half": "max"}

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return loss, and 1 for a row that was computed in half precision."""
        logits = model(batch["tokens"])
        losses = nn.functional.cross_entropy(logits.float(), batch["labels"], reduction="none")
        return {
            "loss": losses,
            "half": torch.full_like(losses, float(logits.dtype == torch.bfloat16)),
        }

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return the means over all rows."""
        return {name: outputs[name].mean().item() for name in ("loss", "half")}


def evaluation(
    out: Path, precision: str, strategy: str = "single", **changes: Any
) -> dict[str, Any]:
    given = {
        "out": str(out),
        "device": "cpu",
        "max_steps": 2,
        "global_batch_size": 4,
        "lr": 0.01,
        "strategy": strategy,
        "eval_precision": precision,
    }
    report = train(RunConfig.model_validate(given | changes), Seen(rows=8))
    return dict(report["evaluation"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return {precision: evaluation(folder / precision, precision) for precision in ("same", "bf16")}


def test_the_precision_shows(alone: dict[str, dict[str, Any]]) -> None:
    assert (alone["same"]["half"], alone["bf16"]["half"]) == (0, 1)
    # ten times the tolerance below
    assert abs(alone["same"]["loss"] - alone["bf16"]["loss"]) > 2e-5


@pytest.mark.ranks
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_evaluates_as_one_process_does(
    name: str, tmp_path: Path, alone: dict[str, dict[str, Any]]
) -> None:
    strategy, options = STRATEGIES[name]
    evaluated = evaluation(tmp_path / "run", "bf16", strategy, strategy_options=options, nproc=2)
    assert evaluated["half"] == 1
    bound = 1e-3 if name == "tp" else 2e-6  # tp adds up parts of a product that are rounded to bf16
    assert evaluated["loss"] == pytest.approx(alone["bf16"]["loss"], abs=bound)

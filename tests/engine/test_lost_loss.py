"""A run whose loss is no number at its end fails, says since when, and keeps the last
weights that are numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distcore import RunConfig, TrainingError, train
from distcore.checkpoint.choice import choose
from distcore.testing.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Loses(Problem):
    """Its loss is no number from one step on, or in that step alone."""

    at: int = 0
    recovers: bool = False
    weights_only: bool = False

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        inner: Any = model
        inner.steps = getattr(inner, "steps", 0) + 1
        if self.weights_only and inner.steps == self.at:
            # its gradient is no number, its value is 0
            return loss + torch.sqrt(inner.head.weight.sum() * 0.0)
        is_lost = inner.steps == self.at or (inner.steps > self.at > 0 and not self.recovers)
        return loss + loss.detach() * math.nan if is_lost and not self.weights_only else loss


def run(out: Path, task: Loses, **changes: Any) -> Any:
    config: dict[str, Any] = {
        "out": str(out),
        "max_steps": 8,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "lr": 0.01,
        "log_every": 3,
        "save_every": 2,
        "device": "cpu",
        "extensions": {"progress": False, "batch_norm": False},
        "eval_every": 2,
    }
    return train(RunConfig.model_validate(config | changes), task)


@pytest.mark.parametrize(("at", "kept"), [(5, 4), (6, 4), (8, 6), (4, 2)])
def test_the_end_says_since_when_and_keeps_the_last_finite_checkpoint(
    at: int, kept: int, tmp_path: Path
) -> None:
    says = (
        f"the loss is not finite since step {at}; step-0000000{kept} is the last checkpoint with a"
        " finite loss"
    )
    with pytest.raises(TrainingError, match=says) as raised:
        run(tmp_path / "run", Loses(at=at))
    assert raised.value.exit_code == 3
    assert choose(tmp_path / "run")[0].name == f"step-0000000{kept}"
    assert choose(tmp_path / "run", best=True)[0].name <= f"step-0000000{kept}"


def test_a_lost_loss_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="since step 1; no checkpoint was saved before"):
        run(tmp_path / "run", Loses(at=1))


def test_a_run_that_ends_early_with_a_lost_loss_fails(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the loss is not finite since step 3; step-00000002"):
        run(tmp_path / "run", Loses(at=3), patience=1)


def test_a_loss_that_recovers_ends_well(tmp_path: Path) -> None:
    class Skips(Loses):
        def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            loss = super().loss(model, batch)
            return (
                loss
                if loss.isfinite()
                else torch.nan_to_num(loss.detach()) * 0 + math.nan + _zero(model)
            )

    def _zero(model: nn.Module) -> Tensor:
        return sum((p.sum() * 0 for p in model.parameters() if p.requires_grad), torch.zeros(()))

    report = run(tmp_path / "run", Skips(at=4, recovers=True))
    assert report["steps"] == 8
    assert not (tmp_path / "run/checkpoints/step-00000004").exists()


def test_weights_that_the_last_step_made_no_numbers_are_seen_in_the_evaluation(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        TrainingError,
        match="loss of the evaluation is not finite after the last step; step-00000006",
    ):
        run(tmp_path / "run", Loses(at=8, weights_only=True))

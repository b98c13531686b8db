"""examples/extension-nanguard: one file that guards a run under any strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from distcore import DistcoreError, RunConfig, launch, train
from distcore.testing.problem import Problem

pytestmark = pytest.mark.ranks

FILE = Path(__file__).parents[2] / "examples/extension-nanguard/nanguard.py"


class Diverges(Problem):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(model, batch) * float("nan")


def guarded(strategy: str, out: Path) -> None:
    extensions = {f"{FILE}:NanGuard": True, "progress": False}
    config = RunConfig(
        strategy=strategy, extensions=extensions, out=str(out), device="cpu", lr=0.01, max_steps=2
    )
    train(config, Diverges())


@pytest.mark.parametrize(("strategy", "nproc"), [("single", 1), ("dp", 1), ("ddp", 2), ("fsdp", 2)])
def test_the_example_ends_a_run_that_diverges(strategy: str, nproc: int, tmp_path: Path) -> None:
    with pytest.raises(DistcoreError, match="the loss is nan: try a lower --lr"):
        launch(guarded, strategy, tmp_path / "run", nproc=nproc)

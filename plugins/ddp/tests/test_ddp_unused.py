"""A parameter without a gradient ends the run before a step is taken, in a line that names
it and the option.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from strategy_chain import is_offered
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcore import Datasets, RunConfig, StrategyError, launch, train
from distcore.testing.problem import Block, Classifier, Problem

ASKS = "; freeze it, or --set strategy_options.find_unused=true"


def config(out: Path, **changes: Any) -> RunConfig:
    settings = {
        "out": str(out),
        "max_steps": 1,
        "global_batch_size": 8,
        "lr": 0.01,
        "device": "cpu",
        "strategy": "ddp",
    }
    return RunConfig.model_validate(settings | {"extensions": {"progress": False}} | changes)


@pytest.mark.ranks
def test_an_unused_parameter_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StrategyError, match=rf"^parameter 'unused.weight' got no gradient in this step{ASKS}$"
    ):
        launch(train, config(tmp_path / "run", nproc=2), Problem(unused=True), nproc=2)


class UsedOnce(Classifier):
    """Leaves a layer out in every forward pass of a training run but the first."""

    used = False

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        if self.training and not self.used:
            self.used = True
            logits = logits + self.unused(self.embedding(tokens)).mean()
        return logits


@dataclass(frozen=True, kw_only=True)
class FirstMicroBatchOnly(Problem):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return UsedOnce(unused=True)


@pytest.mark.programs
def test_a_parameter_that_only_an_earlier_micro_batch_uses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        StrategyError, match=f"^parameter got no gradient in the last backward pass{ASKS}$"
    ):
        train(config(tmp_path / "run", micro_batch_size=4), FirstMicroBatchOnly())
    train(
        config(tmp_path / "more", micro_batch_size=4, strategy_options={"find_unused": True}),
        FirstMicroBatchOnly(),
    )


class Recomputed(Block):
    """A block that a reentrant checkpoint computes anew inside of the backward pass."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        recomputed: Tensor = checkpoint(super().forward, hidden, use_reentrant=True)
        return recomputed


@dataclass(frozen=True, kw_only=True)
class RecomputesBlocks(Problem):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        model: Any = super().build_model(config, data)
        model.blocks = nn.ModuleList(Recomputed() for _ in model.blocks)
        return model  # type: ignore[no-any-return]


@pytest.mark.programs
@pytest.mark.parametrize("strategy", ["ddp", "accelerate"])
def test_a_reentrant_checkpoint_is_refused_where_unused_parameters_are_searched(
    strategy: str, tmp_path: Path
) -> None:
    if not is_offered(strategy):
        pytest.skip(f"{strategy} is not installed")
    task, options = RecomputesBlocks(), {"find_unused": True}
    with pytest.raises(
        StrategyError,
        match=r"parameter 'blocks\.\d\.\S+' got a second gradient in one backward pass, which "
        r"find_unused cannot follow: .* use_reentrant=False, or --set",
    ):
        train(config(tmp_path / "run", strategy=strategy, strategy_options=options), task)
    train(config(tmp_path / "without", strategy=strategy), task)

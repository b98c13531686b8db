"""The kit notices a frozen model that a rank holds whole beside a sharded one."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from distcore import OptimizerFactory, PreparedModel, Run, RunConfig, hookimpl
from distcore.testing import STRATEGIES
from distcore.testing.subject import Subject
from distcore_fsdp.strategy import FSDPStrategy

pytestmark = pytest.mark.ranks


class ShardsTheTrainedOneAlone(FSDPStrategy):
    """Frozen models stay whole, which changes no result."""

    @hookimpl
    def build_model(self, config: RunConfig, world: Any, source: Any) -> Any:
        return source.build()

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        if make_optimizer is None:
            return PreparedModel(model=model, optimizer=None)
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


def test_a_frozen_model_that_is_not_sharded_breaks_the_law() -> None:
    config = RunConfig(strategy="fsdp", nproc=2, device="cpu")
    cases = tuple(STRATEGIES.required[name] for name in ("frozen-model", "frozen-same-after"))
    whole = Subject(config=config, cases=cases, make=lambda _config: ShardsTheTrainedOneAlone())
    (gradient, held), (_, of_strategy) = STRATEGIES.measure_all(
        [whole, Subject(config=config, cases=cases)]
    )
    assert gradient.held
    assert held.held is False, str(held)
    assert of_strategy.held, str(of_strategy)

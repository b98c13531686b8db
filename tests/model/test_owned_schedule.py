"""A strategy that owns the schedule resumes exactly: the hook is told how far the
run was that saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from torch import nn
from torch.optim import Optimizer

from distcore import (
    Capabilities,
    Clip,
    OptimizerFactory,
    PreparedModel,
    Run,
    StepResult,
    defaults,
    hookimpl,
    load_config,
)
from distcore.checkpoint import load, save
from distcore.engine.build import build_run
from distcore.plugin.strategy.contract import Progress, RankInfo
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.strategy.state import SavedState
from distcore.resolve.resolve import resolve
from distcore.strategies.single import SingleStrategy
from distcore.testing import STRATEGIES
from distcore.testing.findings import Finding
from distcore.testing.lab import Unsynced
from distcore.testing.problem import Problem
from distcore.testing.subject import Subject

CONFIG = load_config(
    None, {"strategy": "single", "nproc": 1, "device": "cpu", "lr": 0.01, "max_steps": 20}
)
LAWS = ("mid-epoch", "bit-for-bit")


class Decays(SingleStrategy):
    """Nine tenths of the rate after each step, whatever the config's schedule says."""

    capabilities: ClassVar = Capabilities(
        spec_version=3, processes="one", owns=frozenset({"schedule"})
    )

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        wrapped = defaults.wrap_model(run, model, make_optimizer)
        if wrapped.optimizer is not None:
            self.at(wrapped.optimizer, 0)
        return wrapped

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        result = defaults.step(run, clip)
        assert run.optimizer is not None
        self.at(run.optimizer, run.optimizer.param_groups[0]["done"] + 1)
        return result

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState, progress: Progress) -> bool:
        if run.optimizer is not None:
            self.at(run.optimizer, progress.step)
        return defaults.load_checkpoint(run, state)

    def at(self, optimizer: Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group |= {"done": step, "lr": 0.01 * 0.9**step}


class Forgets(Decays):
    """Begins its schedule again."""

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState, progress: Progress) -> bool:
        return defaults.load_checkpoint(run, state)


def findings(strategy: type[Decays]) -> list[Finding]:
    cases = tuple(case for name, case in STRATEGIES.required.items() if name in LAWS)
    return STRATEGIES.measure_all(
        [Subject(config=CONFIG, cases=cases, make=lambda config: strategy())]
    )[0]


@pytest.mark.ranks
def test_runs_of_a_strategy_that_owns_the_schedule_resume_bit_for_bit() -> None:
    assert [(finding.case, finding.held) for finding in findings(Decays)] == [
        (law, True) for law in LAWS
    ]


@pytest.mark.ranks
def test_the_law_notices_a_schedule_that_begins_again() -> None:
    assert [finding.held for finding in findings(Forgets)] == [False] * len(LAWS)


@pytest.mark.parametrize("saver", [SingleStrategy, Decays])
def test_the_core_leaves_its_learning_rate_alone_whoever_saved(
    tmp_path: Path, saver: type[SingleStrategy]
) -> None:
    run, hooks = built(saver)
    path = save(run, hooks, Progress(step=7, samples=224), tmp_path, {"best": None}, Unsynced())
    run, hooks = built(Decays)
    load(run, hooks, path)
    assert run.optimizer is not None
    assert {group["lr"] for group in run.optimizer.param_groups} == {0.01 * 0.9**7}


def built(strategy: type[SingleStrategy]) -> tuple[Run, Hooks]:
    hooks, task = Hooks("single", strategy()), Problem()
    config = resolve(CONFIG, task=task).config
    return (
        build_run(config, hooks, hooks.setup(config, RankInfo()), task, task.prepare(config)),
        hooks,
    )

"""Measure in ranks what each option of a strategy changes: the backend's own state,
tensors, or what is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from traffic import Traffic

from distcore import Datasets, RankInfo, RunConfig, StrategyError, launch
from distcore.rank_environment.environment import join
from distcore.testing.lab import Job
from distcore.testing.problem import WIDTH, Classifier, Problem
from distcore.testing.rank import lab_of
from distcore.testing.store import store_for
from distcore.testing.subject import Subject

SIDE = 512
"""A layer of this width and height has a weight of one MiB."""
GATHER, SUM = "_allgather_base_", "_reduce_scatter_base_"
"""Operations by which weights of shards are gathered, and their gradients summed."""


@dataclass(frozen=True, kw_only=True)
class Wide(Problem):
    """Its gradients are some MiB."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        model: Any = Classifier(blocks=self.blocks)
        wide = [nn.Linear(SIDE, SIDE) for _ in range(3)]
        model.frozen = nn.Sequential(nn.Linear(WIDTH, SIDE), *wide, nn.Linear(SIDE, WIDTH))
        return model  # type: ignore[no-any-return]


def trains(job: Job) -> bool:
    """Return False if the strategy ends the first step by a line of its own."""
    try:
        job.train(1)
    except StrategyError:
        return False
    return True


def gathered_in(job: Job) -> set[torch.dtype]:
    """Return the dtypes in which a step gathers weights."""
    return _exchanged(job, GATHER)


def summed_in(job: Job) -> set[torch.dtype]:
    """Return the dtypes in which a step sums gradients."""
    return _exchanged(job, SUM)


def _exchanged(job: Job, operation: str) -> set[torch.dtype]:
    with Traffic() as traffic:
        job.train(1)
    return set(traffic.dtypes(operation))


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What an option changes, on two ranks."""

    measured: Callable[[Job], object]
    """Takes a job that has not trained yet, and returns what is compared."""
    default: object
    """What is measured with ``without``."""
    changed: tuple[tuple[dict[str, Any], object], ...]
    """Options of the strategy, each with what is measured then."""
    without: dict[str, Any] = field(default_factory=dict)
    """Options of the strategy that lack the one in question."""
    problem: Problem = field(default_factory=Problem)
    """What the job trains."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes to the config of the job."""


def assert_effects(strategy: str, effects: Mapping[str, Effect], folder: Path) -> None:
    """Assert that the main rank measures what ``effects`` say, by option, with all of
    them in one launch.
    """
    results, _ = launch(_measure, strategy, effects, folder, nproc=2)
    for option, effect in effects.items():
        measured, expected = (
            results[option],
            [effect.default, *(value for _, value in effect.changed)],
        )
        assert measured == expected, f"{option}: measured {measured}, expected {expected}"


def _measure(strategy: str, effects: Mapping[str, Effect], folder: Path) -> dict[str, list[object]]:
    """Return for each option what this rank measures without it, and with each of its values."""
    turn = count()
    results: dict[str, list[object]] = {}
    for option, effect in effects.items():
        each = (effect.without, *(options for options, _ in effect.changed))
        results[option] = [
            _measure_one(strategy, options, effect, folder, next(turn)) for options in each
        ]
    return results


def _measure_one(
    strategy: str, options: dict[str, Any], effect: Effect, folder: Path, turn: int
) -> object:
    config = RunConfig(strategy=strategy, strategy_options=options, nproc=2, device="cpu")
    own = folder / str(turn)
    own.mkdir(exist_ok=True)  # the other rank makes it, too
    rank_info = join(os.environ) or RankInfo()
    with store_for(turn, own, rank_info, 60), lab_of(Subject(config=config, cases=()), own) as lab:
        return effect.measured(lab.job(effect.problem, max_steps=2, **effect.changes))

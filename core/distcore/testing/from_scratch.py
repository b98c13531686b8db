"""A run's model with random weights, for tests of strategies that build it part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from distcore.config import RunConfig
from distcore.engine.model_source import base_source
from distcore.plugin.contract import ModelSource
from distcore.plugin.task import Datasets
from distcore.testing.problem import Problem


def from_scratch(make: Callable[[], nn.Module], seed: int) -> ModelSource:
    """Return how a run builds the model that ``make`` returns, whole or not, with random weights under ``seed``."""
    config, task = RunConfig(seed=seed), _Made(make=make)
    return base_source(config, task, task.prepare(config))


@dataclass(frozen=True, kw_only=True)
class _Made(Problem):
    make: Callable[[], nn.Module]

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return self.make()

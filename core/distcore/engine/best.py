"""The best evaluation of a run: keep it up to date, and read it from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distcore.config import RunConfig
from distcore.plugin.strategy.contract import Evaluation, Progress
from distcore.plugin.task.task import Direction


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best evaluation so far."""

    step: int
    """Optimizer step of the evaluation."""
    metric: str
    """Name of the compared metric."""
    value: float
    """Value of the metric."""
    waited: int = 0
    """Evaluations since, none of them better."""


def update_best(
    progress: Progress,
    best: Best | None,
    evaluation: Evaluation,
    metric: str | None,
    directions: Mapping[str, Direction],
) -> tuple[Best | None, bool]:
    """Return the best of ``best`` and the new ``evaluation`` by ``metric``, and True if the new one is better."""
    value = evaluation.metrics.get(metric) if metric else None
    if metric is not None and isinstance(value, float | int) and math.isfinite(value):
        sign = -1 if directions[metric] == "min" else 1
        if best is None or sign * value > sign * best.value:
            return Best(step=progress.step, metric=metric, value=float(value)), True
    return replace(best, waited=best.waited + 1) if best else None, False


def out_of_patience(config: RunConfig, best: Best | None) -> bool:
    """Return True if the last ``patience`` evaluations were not better. All ranks compare the same evaluations."""
    return config.patience > 0 and best is not None and best.waited >= config.patience


def saved_best(saved: object, metric: str | None) -> Best | None:
    """Return the best evaluation from ``saved``, its value in state.json; ``None`` if it has another metric."""
    if not isinstance(saved, dict) or metric is None or saved.get("metric") != metric:
        return None
    step, value, waited = saved.get("step"), saved.get("value"), saved.get("waited", 0)
    if isinstance(step, int) and isinstance(value, float) and isinstance(waited, int):
        return Best(step=step, metric=metric, value=value, waited=waited)
    return None

"""The best evaluation of a run: which it is, and which one a checkpoint says it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from distcore.plugin.contract import Evaluation, Progress, Run
from distcore.plugin.task import Direction


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best evaluation so far."""

    step: int
    """Optimizer step after which it was done."""
    metric: str
    """Name of the metric that is compared."""
    value: float
    """Its value."""


def update_best(
    run: Run, progress: Progress, best: Best | None, found: Evaluation, metrics: Mapping[str, Direction]
) -> tuple[Best | None, bool]:
    """Return the best evaluation so far, ``found`` included, and whether it is ``found``.

    ``metrics`` says of each metric whether less or more of it is better.
    """
    metric = run.config.checkpoints.best
    value = found.metrics.get(metric) if metric else None
    if metric is None or not isinstance(value, float | int) or not math.isfinite(value):
        return best, False
    sign = -1 if metrics[metric] == "min" else 1
    if best is not None and sign * value <= sign * best.value:
        return best, False
    return Best(step=progress.step, metric=metric, value=float(value)), True


def saved_best(saved: object, metric: str | None) -> Best | None:
    """Return the best evaluation that state.json has as ``saved``; ``None`` if another metric was compared."""
    if not isinstance(saved, dict) or metric is None or saved.get("metric") != metric:
        return None
    step, value = saved.get("step"), saved.get("value")
    return Best(step=step, metric=metric, value=value) if isinstance(step, int) and isinstance(value, float) else None

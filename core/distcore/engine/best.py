"""The best evaluation of a run: keep it up to date, and take it over from a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distcore.checkpoint.job_state import EVALUATION_ROWS, fingerprint, keeps_rows, saved_config
from distcore.config import RunConfig
from distcore.errors import CheckpointError, TaskError
from distcore.plugin.strategy.contract import Evaluation, Progress
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Dataset, Datasets, Direction
from distcore.resolve.resolve import best_metric

log = logging.getLogger("distcore")


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
    """Return the best of ``best`` and a new ``evaluation``, and True if the new one is better.

    They are compared by ``metric``, in its direction.
    """
    value = evaluation.metrics.get(metric) if metric else None
    if metric is not None and isinstance(value, float | int) and math.isfinite(value):
        sign = -1 if directions[metric] == "min" else 1
        if best is None or sign * value > sign * best.value:
            return Best(step=progress.step, metric=metric, value=float(value)), True
    return replace(best, waited=best.waited + 1) if best else None, False


def out_of_patience(config: RunConfig, best: Best | None) -> bool:
    """Return True if the last ``patience`` evaluations were not better.

    All ranks compare the same evaluations.
    """
    return config.patience > 0 and best is not None and best.waited >= config.patience


def fingerprint_of_judged(config: RunConfig, task: BoundTask, data: Datasets) -> str | None:
    """Return a digest of the evaluation rows that judge a run.

    ``None`` without a metric, or for rows without a digest.
    """
    metric = best_metric(config, task, data)
    if metric is None:
        return None
    with suppress(TaskError):  # rows that cannot be told from others without reading them all
        return fingerprint(_judged(metric, task, data))
    return None


def _judged(metric: str, task: BoundTask, data: Datasets) -> Dataset:
    """Return the evaluation rows of the set that ``metric`` is of."""
    for name, rows in data.evaluations.items():
        if metric in (f"{name}/{declared}" for declared in task.declared_metrics):
            return rows
    return data.evaluation


def resumed_best(
    config: RunConfig,
    task: BoundTask,
    data: Datasets,
    rows: str | None,
    job_state: Mapping[str, Any],
    path: Path,
) -> Best | None:
    """Return the best evaluation of the checkpoint at ``path``; ``None`` if it is not comparable.

    Its value is of the rows that it was measured on: with others, no later evaluation might reach
    it, and the run would keep the wrong weights and lose its patience. ``rows`` is
    ``fingerprint_of_judged``. Raises CheckpointError for other rows that nobody accepted.
    """
    saved = job_state.get("best")
    metric = best_metric(config, task, data)
    best = saved_best(saved, metric)
    if best is None:
        if isinstance(saved, dict) and metric is not None:
            log.info(
                "resume: the best evaluation, at step %s, was by %s: by %s it begins anew",
                saved.get("step"),
                saved.get("metric"),
                metric,
            )
        return None
    if rows is None or job_state.get("evaluation_data") in (rows, None):
        return best
    is_accepted = EVALUATION_ROWS in (config.resume_changed or ())
    value = f"{best.metric} {best.value:.4g} at step {best.step}"
    if not is_accepted and keeps_rows(config, task.on_resume):
        raise CheckpointError(
            f"resume = {str(path)!r}: its best evaluation, {value}, is of other evaluation rows,"
            " with which those of this run cannot be compared; resume with the same, or accept"
            f" them with --resume-changed {EVALUATION_ROWS}: best and patience then begin anew"
        )
    log.info(
        "resume: the best evaluation, %s, is of other evaluation rows: best and patience begin"
        " anew",
        value,
    )
    return None


def check_judged_rows(
    config: RunConfig, task: BoundTask, data: Datasets, job_state: Mapping[str, Any], path: Path
) -> None:
    """Raise CheckpointError, before ranks start, as ``resumed_best`` will.

    Not where the resume is refused for another reason, whose message is the better one.
    """
    options_before = dict(saved_config(dict(job_state), path).task_options)
    options_now = dict(config.task_options)
    compared = [
        key
        for key in options_before.keys() | options_now.keys()
        if task.on_resume.get(key) != "free"
    ]
    are_same = all(options_before.get(key) == options_now.get(key) for key in compared)
    is_accepted = EVALUATION_ROWS in (config.resume_changed or ())
    if not are_same or is_accepted:
        return
    if job_state.get("data") in (fingerprint(data.train), None):
        judged = fingerprint_of_judged(config, task, data)
        resumed_best(config, task, data, judged, job_state, path)


def saved_best(saved: object, metric: str | None) -> Best | None:
    """Return the best evaluation from its entry in state.json; ``None`` if by another metric."""
    if not isinstance(saved, dict) or metric is None or saved.get("metric") != metric:
        return None
    step = saved.get("step")
    value = saved.get("value")
    waited = saved.get("waited", 0)
    if isinstance(step, int) and isinstance(value, float) and isinstance(waited, int):
        return Best(step=step, metric=metric, value=value, waited=waited)
    return None

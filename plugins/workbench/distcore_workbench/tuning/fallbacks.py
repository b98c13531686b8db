"""Fallbacks, which need less and less memory, and the trials with the best speed for theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distcore import RunConfig
from distcore_workbench.tuning.outcome import Outcome
from distcore_workbench.tuning.settings import Setting

TOKENS = 4096
"""Tokens of the larger micro-batches to try, if the job counts rows."""
ONE_ROW: Setting = {"micro_batch_size": 1, "micro_batch_tokens": None}
RECOMPUTED: Setting = {"gradient_checkpointing": True}


def fallback_settings(strategies: Sequence[Setting]) -> list[Setting]:
    """Return the settings to try in turn until one fits.

    Each needs less memory than the one before. ``strategies`` must be sorted by memory, the
    largest first.
    """
    small: Setting = {**ONE_ROW, **RECOMPUTED}
    small_by_strategy = [{**small, **strategy} for strategy in strategies]
    return [{}, ONE_ROW, small, *small_by_strategy]


def larger_micro_batches(config: RunConfig, fallback: Setting) -> list[Setting]:
    """Return a fallback with larger micro-batches, the largest first.

    ``config`` is the resolved config of the job.
    """
    if "micro_batch_size" not in fallback:
        return []
    tokens = config.micro_batch_tokens or TOKENS
    largest = tokens
    if fallback.keys() == ONE_ROW.keys():  # with all of the tokens it would be the job as given
        largest = tokens // 2
    by_tokens = {**fallback, "micro_batch_size": "auto"}
    return [{**by_tokens, "micro_batch_tokens": bound} for bound in (largest, tokens // 4)]


def frontier(trials: Sequence[tuple[Setting, Outcome]]) -> list[tuple[Setting, Outcome]]:
    """Return the successful trials that none beats in speed and in memory, the fastest first."""

    def fastest_first(trial: tuple[Setting, Outcome]) -> tuple[float, float]:
        _, outcome = trial
        return -outcome.speed, outcome.peak

    successful = [trial for trial in trials if trial[1].result == "ok"]
    successful.sort(key=fastest_first)
    best: list[tuple[Setting, Outcome]] = []
    least_memory = math.inf
    for setting, outcome in successful:
        if outcome.peak < least_memory:
            best.append((setting, outcome))
            least_memory = outcome.peak
    return best

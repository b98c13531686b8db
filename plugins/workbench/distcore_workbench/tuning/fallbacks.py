"""Fallbacks: settings that need less and less memory, and the trials with the best
speed for their memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from distcore import RunConfig
from distcore_workbench.tuning.outcome import Outcome
from distcore_workbench.tuning.settings import Setting

TOKENS = 4096
"""Tokens of the larger micro-batches to try, if the job counts rows."""
ONE_ROW: Setting = {"micro_batch_size": 1, "micro_batch_tokens": None}
RECOMPUTED: Setting = {"gradient_checkpointing": True}


def fallback_settings(strategies: Sequence[Setting]) -> list[Setting]:
    """Return the settings to try in turn until one fits. Each needs less memory
    than the one before.

    ``strategies`` must be sorted by memory, the largest first.
    """
    small: Setting = {**ONE_ROW, **RECOMPUTED}
    return [{}, ONE_ROW, small, *({**small, **one} for one in strategies)]


def larger_micro_batches(config: RunConfig, fallback: Setting) -> list[Setting]:
    """Return a fallback with larger micro-batches, the largest first. ``config`` is the resolved
    config of the job.
    """
    if "micro_batch_size" not in fallback:
        return []
    tokens = config.micro_batch_tokens or TOKENS
    bounds = [tokens, tokens // 4]
    if fallback.keys() == ONE_ROW.keys():  # with all of the tokens it would be the job as given
        bounds[0] //= 2
    return [
        {**fallback, "micro_batch_size": "auto", "micro_batch_tokens": bound} for bound in bounds
    ]


def frontier(trials: Sequence[tuple[Setting, Outcome]]) -> list[tuple[Setting, Outcome]]:
    """Return the Pareto frontier of the successful trials in speed and
    memory, the fastest first.
    """
    best: list[tuple[Setting, Outcome]] = []
    for setting, outcome in sorted(trials, key=lambda pair: (-pair[1].speed, pair[1].peak)):
        if outcome.result == "ok" and (not best or outcome.peak < best[-1][1].peak):
            best.append((setting, outcome))
    return best

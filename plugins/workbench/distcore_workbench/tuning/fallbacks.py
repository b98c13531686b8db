"""The ladder: what to give up for memory, step by step, and the trials that are the fastest for what they take."""

from __future__ import annotations

from collections.abc import Sequence

from distcore import RunConfig
from distcore_workbench.tuning.outcome import Outcome
from distcore_workbench.tuning.settings import Setting

TOKENS = 4096
"""Tokens of a micro-batch to come back to, where the job counts rows."""
ONE_ROW: Setting = {"micro_batch_size": 1, "micro_batch_tokens": None}
RECOMPUTED: Setting = {"gradient_checkpointing": True}


def rungs(strategies: Sequence[Setting]) -> list[Setting]:
    """Return the settings to try in turn until one fits: each needs less memory than those before it.

    ``strategies`` must be in the order of what they need, most first.
    """
    small: Setting = {**ONE_ROW, **RECOMPUTED}
    return [{}, ONE_ROW, small, *({**small, **one} for one in strategies)]


def larger(config: RunConfig, rung: Setting) -> list[Setting]:
    """Return the rung with larger micro-batches, the largest first; ``config`` is that of the job, resolved."""
    if "micro_batch_size" not in rung:
        return []
    tokens = config.micro_batch_tokens or TOKENS
    bounds = [tokens, tokens // 4]
    if rung.keys() == ONE_ROW.keys():  # with all of the tokens it would be the job as given
        bounds[0] //= 2
    return [{**rung, "micro_batch_size": "auto", "micro_batch_tokens": bound} for bound in bounds]


def frontier(trials: Sequence[tuple[Setting, Outcome]]) -> list[tuple[Setting, Outcome]]:
    """Return the trials that went well and of which no other is both faster and smaller, the fastest first."""
    found: list[tuple[Setting, Outcome]] = []
    for setting, outcome in sorted(trials, key=lambda pair: (-pair[1].speed, pair[1].peak)):
        if outcome.result == "ok" and (not found or outcome.peak < found[-1][1].peak):
            found.append((setting, outcome))
    return found

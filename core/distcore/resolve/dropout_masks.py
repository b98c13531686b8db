"""Whether dropout masks follow from the row or from the rank."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from distcore.checkpoint import find, read_job_state
from distcore.config import RunConfig
from distcore.errors import CheckpointError, ConfigError
from distcore.plugin.strategy.capabilities import Capabilities

log = logging.getLogger("distcore")


def dropout_masks(config: RunConfig, declared: Capabilities, compile_mode: str) -> str:
    """Return ``row`` or ``rank``. A resumed run keeps the masks of its checkpoint, so that both parts are one run.

    Raises ConfigError if the user asks for masks by row where they cannot be.
    """
    why_not = _why_not(config, declared, compile_mode)
    if config.dropout_masks == "row" and why_not:
        raise ConfigError(f"dropout_masks = 'row': {why_not}; leave it out")
    usual = "rank" if why_not else "row"
    before = _before(config)
    chosen = config.dropout_masks if config.dropout_masks != "auto" else before if not why_not and before else usual
    if before and before != chosen:
        log.info("dropout_masks: %s, and %s in the resumed checkpoint: masks change from here on", chosen, before)
    return chosen


def _why_not(config: RunConfig, declared: Capabilities, compile_mode: str) -> str:
    """Return why masks cannot follow from the row; empty if they can."""
    if config.device != "cpu":
        return f"device {config.device!r} has no such masks yet"
    if compile_mode != "off":
        return "compiled code draws its own"
    if declared.ranks_per_shard > 1:
        return f"strategy {config.strategy!r} splits rows or layers over ranks"
    return ""


def _before(config: RunConfig) -> str | None:
    """Return the masks of the resumed checkpoint; ``None`` for a new run. Older checkpoints do not name theirs."""
    if config.resume:
        with suppress(CheckpointError, OSError):  # the resume itself reports it
            if path := find(config.resume, Path(str(config.out))):
                saved: str = read_job_state(path).get("config", {}).get("dropout_masks", "rank")
                return saved
    return None

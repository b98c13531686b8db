"""Whether masks of dropout are drawn by row or by rank."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from distcore.checkpoint import Checkpoint, find
from distcore.config import RunConfig
from distcore.errors import CheckpointError, ConfigError
from distcore.plugin.strategy.capabilities import Capabilities

log = logging.getLogger("distcore")


def dropout_masks(config: RunConfig, declared: Capabilities, compile_mode: str) -> str:
    """Return ``row`` or ``rank``. A resumed run keeps the masks of its checkpoint, so that both
    parts are one run.

    Raises ConfigError if the user asks for masks by row where they cannot be.
    """
    why_not = _why_not_by_row(config, declared, compile_mode)
    if config.dropout_masks == "row" and why_not:
        raise ConfigError(f"dropout_masks = 'row': {why_not}; leave it out")
    saved_masks = _saved_masks(config)
    chosen: str = config.dropout_masks
    if chosen == "auto":
        # What masks by row cost was measured on CPUs only.
        is_by_row = config.device == "cpu" and not why_not
        chosen = "row" if is_by_row else "rank"
        if saved_masks and not why_not:
            chosen = saved_masks
    if saved_masks and saved_masks != chosen:
        log.info(
            "dropout_masks: %s, and %s in the resumed checkpoint: masks change from here on",
            chosen,
            saved_masks,
        )
    return chosen


def _why_not_by_row(config: RunConfig, declared: Capabilities, compile_mode: str) -> str:
    """Return why masks cannot be drawn by row; empty if they can."""
    if compile_mode != "off":
        return "compiled code draws its own"
    if declared.ranks_per_shard > 1 and not declared.row_masks:
        return f"strategy {config.strategy!r} splits rows or layers over ranks"
    return ""


def _saved_masks(config: RunConfig) -> str | None:
    """Return the masks of the resumed checkpoint; ``None`` for a new run."""
    if not config.resume:
        return None
    # An unusable checkpoint is reported by the resume itself.
    with suppress(CheckpointError, OSError):
        path = find(config.resume, Path(str(config.out)))
        if path is not None:
            saved_config = Checkpoint(path).job_state().get("config", {})
            # Checkpoints older than the option do not name their masks, which are by rank.
            masks: str = saved_config.get("dropout_masks", "rank")
            return masks
    return None

"""The phases into which the time of a run is divided."""

from __future__ import annotations

PHASES = ("starting", "data", "forward", "backward", "step", "log", "other", "evaluation", "save")
"""The phases. ``forward`` of an optimizer step that a strategy makes by its own ``train_step`` is
the whole of it.
"""
TRAINING = ("data", "forward", "backward", "step", "log", "other")
"""The phases of training."""

"""The phases of a run, as its times are told."""

from __future__ import annotations

PHASES = ("starting", "data", "forward", "backward", "step", "log", "other", "evaluation", "save")
"""The phases. ``forward`` of an optimizer step that a strategy makes by its own ``train_step`` is
the whole of it.
"""
TRAINING = ("data", "forward", "backward", "step", "log", "other")
"""Those of which training consists."""

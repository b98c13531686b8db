"""The contents of another trainer's checkpoint, by the names of distcore's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignState:
    """Weights, optimizer state and position of a run of another trainer."""

    source: str
    """The trainer, in words."""
    weights: Mapping[str, Tensor]
    """Parameters by their first names, and persistent buffers."""
    moments: Mapping[str, Mapping[str, Tensor]]
    """The optimizer's tensors: by parameter, then by the optimizer's own keys."""
    step: int
    """Optimizer steps that were done."""
    groups: list[dict[str, Any]]
    """The optimizer's groups of parameters, with their settings."""
    group_names: list[list[str]]
    """The names of the parameters in each of these groups."""
    total_steps: int | None = None
    """Steps of the whole run, where the checkpoint says them."""
    scaler: Mapping[str, Any] = field(default_factory=dict)
    """The loss scale of fp16, by the keys of ``torch.amp.GradScaler``."""

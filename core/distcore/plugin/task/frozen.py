"""Frozen models, which a task uses in addition to the trained one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from distcore.config import RunConfig
    from distcore.plugin.task.task import Datasets

Initial = Literal["initial"]
INITIAL: Final = "initial"
"""The trained model before its first step; with LoRA the base itself, without extra memory."""


@dataclass(frozen=True)
class FrozenModel:
    """How to build a frozen model."""

    build: Callable[[RunConfig, Datasets], nn.Module]
    """Returns the model in fp32 on torch's default device, like ``build_model`` of a task."""
    folder: Path | None = None
    """The local folder of its safetensors files; ``None`` if ``build`` draws or reads weights."""

"""What a task says of models that it uses beside the one that it trains."""

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
"""The trained model as it began. With LoRA it is the base itself, so that it takes no memory of its own."""


@dataclass(frozen=True)
class FrozenModel:
    """How to build a model that is used and not trained."""

    build: Callable[[RunConfig, Datasets], nn.Module]
    """What ``build_model`` of a task is: it returns the model in fp32 on torch's default device."""
    folder: Path | None = None
    """The local folder whose safetensors files hold its weights; ``None`` for random ones and what it reads itself."""

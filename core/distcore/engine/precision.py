"""Mixed precision: autocast for the forward pass, and a loss scaler for fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from distcore.config import RunConfig
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.strategy.contract import World

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_for(
    config: RunConfig, capabilities: Capabilities, world: World, evaluates: bool = False
) -> AbstractContextManager[object]:
    """Return a reusable context manager for the forward passes of training, or of evaluation."""
    precision = config.precision
    if evaluates and config.eval_precision != "same":
        precision = config.eval_precision
    if precision == "fp32" or "precision" in capabilities.owns:
        return nullcontext()
    return torch.autocast(world.device.type, dtype=DTYPES[precision])


def scaler_for(
    config: RunConfig, capabilities: Capabilities, world: World
) -> torch.amp.GradScaler | None:
    """Return a dynamic loss scaler for fp16; ``None`` if the strategy owns ``precision``.

    Also for other precisions.
    """
    if config.precision != "fp16" or "precision" in capabilities.owns:
        return None
    return torch.amp.GradScaler(world.device.type)

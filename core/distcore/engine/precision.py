"""Mixed precision: autocast for the forward pass, attention in bf16, and a loss scaler for fp16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from distcore.config import RunConfig
from distcore.plugin.capabilities import Capabilities
from distcore.plugin.contract import World

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_for(config: RunConfig, capabilities: Capabilities, world: World) -> AbstractContextManager[object]:
    """Return the context manager for every forward pass of a run; it can be entered again and again."""
    if config.precision == "fp32" or "precision" in capabilities.owns:
        return nullcontext()
    return torch.autocast(world.device.type, dtype=DTYPES[config.precision])


def scaler_for(config: RunConfig, capabilities: Capabilities, world: World) -> torch.amp.GradScaler | None:
    """Return a dynamic loss scaler for fp16; ``None`` for other precisions or if the strategy owns ``precision``."""
    if config.precision != "fp16" or "precision" in capabilities.owns:
        return None
    return torch.amp.GradScaler(world.device.type)


@contextmanager
def attention_in_bf16(config: RunConfig) -> Iterator[None]:
    """Have attention with dropout multiply in bf16 on a CPU, while a bf16 run lasts.

    torch has no kernel for it there: it computes step by step, and casts what is in bf16 to fp32 first. The softmax
    itself is summed in fp32 either way.
    """
    backend = torch.backends.cuda  # where torch keeps the setting of all devices
    if config.precision != "bf16" or config.device != "cpu":
        yield
        return
    before = backend.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    backend.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        backend.allow_fp16_bf16_reduction_math_sdp(before)

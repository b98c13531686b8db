"""Clip the whole gradient as one process would, although each rank holds only a part of it."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from distcore import Clip, gradient_norm


@torch.no_grad()
def clip_gradients(
    gradients: dict[str, Tensor], clip: Clip, counted: Collection[str], device: torch.device
) -> Tensor | None:
    """Clip this rank's parts of the gradients in place.

    Returns the norm before clipping; ``None`` if the norm is not clipped. ``counted`` names the
    gradients that this rank adds to the norm. If several ranks hold the same part, only one of them
    counts it. One number is summed over the ranks.
    """
    local = list(gradients.values())
    norm = None
    if clip.norm is not None:
        counted_gradients = [gradients[name] for name in gradients if name in counted]
        square = gradient_norm.squared_norm(counted_gradients).to(device)
        dist.all_reduce(square)
        norm = square.sqrt().float()
        # As torch's clip_grad_norm_ does, 1e-6 guards against a norm of zero.
        factor = (clip.norm / (norm + 1e-6)).clamp(max=1.0)
        gradient_norm.scale(local, factor)
    if clip.value is not None and local:
        torch._foreach_clamp_min_(local, -clip.value)
        torch._foreach_clamp_max_(local, clip.value)
    return norm

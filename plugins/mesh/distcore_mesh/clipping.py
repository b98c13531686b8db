"""Clip the whole gradient, of which each rank holds a part, as one process would."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from distcore import Clip


@torch.no_grad()
def clip_gradients(
    gradients: dict[str, Tensor], clip: Clip, counted: Collection[str], device: torch.device
) -> Tensor | None:
    """Clip ``gradients``, what this rank holds of each, in place; return the norm before, if clipped by it.

    ``counted`` names those that count on this rank: of equal parts that several ranks hold one counts. One number is
    summed over the ranks.
    """
    local = list(gradients.values())
    norm = None
    if clip.norm is not None:
        mine = [gradient for name, gradient in gradients.items() if name in counted]
        norms = [*torch._foreach_norm(mine)] if mine else []
        square = torch.stack(norms).float().square().sum() if norms else torch.zeros((), device=device)
        dist.all_reduce(square)
        norm = square.sqrt()
        if local:
            torch._foreach_mul_(local, (clip.norm / (norm + 1e-6)).clamp(max=1.0))
    if clip.value is not None and local:
        torch._foreach_clamp_min_(local, -clip.value)
        torch._foreach_clamp_max_(local, clip.value)
    return norm

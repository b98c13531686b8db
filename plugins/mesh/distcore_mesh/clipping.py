"""Clip the whole gradient, of which each rank holds a part, as one process would."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distcore import Clip, dtensors


@torch.no_grad()
def clip_gradients(
    parameters: dict[str, nn.Parameter], clip: Clip, split: Collection[str], first_of_group: bool
) -> Tensor | None:
    """Clip in place the gradients of ``parameters``; return the norm before, if clipped by it.

    ``split`` names the parameters of which the ranks of a tensor-parallel group hold unlike parts. All others are equal
    in that group, and count on its first rank, ``first_of_group``. One number is summed over the ranks.
    """
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    local = [_local(gradient) for gradient in gradients.values()]
    norm = None
    if clip.norm is not None:
        counted = [
            _local(gradient)
            for name, gradient in gradients.items()
            if (first_of_group or name in split) and not dtensors.is_replica(gradient)
        ]
        device = local[0].device if local else torch.device("cpu")
        square = torch.zeros((), device=device)
        if counted:
            square = torch.stack(torch._foreach_norm(counted)).float().square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        torch._foreach_mul_(local, (clip.norm / (norm + 1e-6)).clamp(max=1.0))
    if clip.value is not None:
        torch._foreach_clamp_min_(local, -clip.value)
        torch._foreach_clamp_max_(local, clip.value)
    return norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient

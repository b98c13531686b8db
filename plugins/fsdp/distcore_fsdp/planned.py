"""What a rank holds and sends under ``fully_shard``, known before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from distcore import Memory, OptimizerFactory, footprint


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """How ``fully_shard`` is told to shard, as far as memory and traffic depend on it."""

    shards: int
    """Ranks that share one copy of the parameters."""
    replicas: int
    """Groups of such ranks."""
    frees: bool
    """Whether the parameters of a unit are freed after its forward pass."""
    offloads: bool
    """Whether shards, gradients and optimizer state are in main memory."""
    gathered_in: torch.dtype
    """Dtype in which parameters are gathered."""
    reduced_in: torch.dtype
    """Dtype in which gradients are averaged."""


def planned(
    skeleton: nn.Module, units: Mapping[str, nn.Module], make_optimizer: OptimizerFactory, how: Sharded
) -> Memory:
    """Return what the first rank holds, which has the most, and sends; ``skeleton`` is on the meta device.

    A parameter is cut along its first dimension, and rounded up to whole rows.
    """

    def shard(name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        return (-(-parameter.shape[0] // how.shards), *parameter.shape[1:]) if parameter.dim() else ()

    held = footprint.resized(skeleton, shard)
    parameters, gradients = footprint.nbytes(held.parameters()), footprint.nbytes(footprint.trained(held))
    optimizer = footprint.optimizer_bytes(make_optimizer(held))
    root, inside = _wholes(skeleton, units, how)
    every = root + sum(inside)
    reduced = sum(p.numel() for p in footprint.trained(held)) * how.shards * how.reduced_in.itemsize
    averaged = footprint.shared(reduced, how.shards) + footprint.shared(reduced // how.shards, how.replicas, times=2)
    gathered = footprint.shared(root + 2 * sum(inside), how.shards) if how.frees else 0
    return Memory(
        parameters=0 if how.offloads else parameters,
        gradients=0 if how.offloads else gradients,
        optimizer=0 if how.offloads else optimizer,
        buffers=root + max(inside, default=0) if how.frees else every,
        host=parameters + gradients + optimizer if how.offloads else 0,
        sent=averaged + (0 if how.frees else footprint.shared(every, how.shards)),
        sent_each=gathered,
    )


def _wholes(skeleton: nn.Module, units: Mapping[str, nn.Module], how: Sharded) -> tuple[int, list[int]]:
    """Return the bytes, gathered, of what is left to the root and of each unit; units come before what has them."""
    seen: set[int] = set()
    sizes = []
    for module in (*units.values(), skeleton):
        own = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen.update(map(id, own))
        rows = (p.numel() // p.shape[0] * -(-p.shape[0] // how.shards) * how.shards if p.dim() else 1 for p in own)
        sizes.append(sum(rows) * how.gathered_in.itemsize)
    return sizes[-1], sizes[:-1]

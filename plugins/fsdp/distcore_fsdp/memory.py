"""Compute the memory and the traffic of a rank under ``fully_shard``, before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from distcore import Memory, OptimizerFactory, footprint


@dataclass(frozen=True, kw_only=True)
class ShardingSettings:
    """The settings of ``fully_shard`` that memory and traffic depend on."""

    shards: int
    """Ranks that share one copy of the parameters."""
    replicas: int
    """Groups of such ranks."""
    frees: bool
    """True if the parameters of a unit are freed after its forward pass."""
    offloads: bool
    """True if shards, gradients and optimizer state are in main memory."""
    gathered_in: torch.dtype | None
    """Dtype in which parameters are gathered; ``None``: each in its own."""
    reduced_in: torch.dtype
    """Dtype in which gradients are averaged."""


def sharded_memory(
    meta_model: nn.Module,
    units: Mapping[str, nn.Module],
    make_optimizer: OptimizerFactory,
    settings: ShardingSettings,
) -> Memory:
    """Return the memory and the traffic of the first rank, which holds most. ``meta_model`` is
    on the meta device.

    Each parameter is sharded along its first dimension, rounded up to whole rows.
    """

    def shard(name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        return (
            (-(-parameter.shape[0] // settings.shards), *parameter.shape[1:])
            if parameter.dim()
            else ()
        )

    shards = footprint.resized(meta_model, shard)
    parameters, gradients = (
        footprint.nbytes(shards.parameters()),
        footprint.nbytes(footprint.trained(shards)),
    )
    optimizer = footprint.optimizer_bytes(make_optimizer(shards))
    root, inside = _gathered_bytes(meta_model, units, settings)
    every = root + sum(inside)
    reduced = (
        sum(p.numel() for p in footprint.trained(shards))
        * settings.shards
        * settings.reduced_in.itemsize
    )
    in_replica = footprint.shared(reduced, settings.shards)
    between_replicas = footprint.shared(reduced // settings.shards, settings.replicas, times=2)
    gathered = footprint.shared(root + 2 * sum(inside), settings.shards) if settings.frees else 0
    return Memory(
        parameters=0 if settings.offloads else parameters,
        gradients=0 if settings.offloads else gradients,
        optimizer=0 if settings.offloads else optimizer,
        buffers=root + max(inside, default=0) if settings.frees else every,
        host=parameters + gradients + optimizer if settings.offloads else 0,
        sent=in_replica
        + between_replicas
        + (0 if settings.frees else footprint.shared(every, settings.shards)),
        sent_each=gathered,
    )


def _gathered_bytes(
    meta_model: nn.Module, units: Mapping[str, nn.Module], settings: ShardingSettings
) -> tuple[int, list[int]]:
    """Return the bytes of the root's own gathered parameters, and of each unit's.
    Children come before parents.
    """
    seen: set[int] = set()
    sizes = []
    for module in (*units.values(), meta_model):
        own = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen.update(map(id, own))
        sizes.append(
            sum(
                _padded(p, settings.shards) * (settings.gathered_in or p.dtype).itemsize
                for p in own
            )
        )
    return sizes[-1], sizes[:-1]


def _padded(parameter: nn.Parameter, shards: int) -> int:
    """Return the elements of a gathered parameter, with the padding of its shards."""
    if not parameter.dim():
        return 1
    return parameter.numel() // parameter.shape[0] * -(-parameter.shape[0] // shards) * shards

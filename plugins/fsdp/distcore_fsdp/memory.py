"""Compute the memory and the traffic of a rank under ``fully_shard``, before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    parted: frozenset[str] = frozenset()
    """Parameters of which a rank gathers one part alone, such as its experts, by name."""
    parts: int = 1
    """Number of their parts."""


def sharded_memory(
    meta_model: nn.Module,
    units: Mapping[str, nn.Module],
    make_optimizer: OptimizerFactory,
    settings: ShardingSettings,
) -> Memory:
    """Return the memory and the traffic of the first rank, which holds most.

    ``meta_model`` is on the meta device. Each parameter is sharded along its first dimension,
    rounded up to whole rows.
    """

    def shard(name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        if not parameter.dim():
            return ()
        return _rows_of_shard(parameter, settings.shards), *parameter.shape[1:]

    shards = footprint.resized(meta_model, shard)
    parameters = footprint.nbytes(shards.parameters())
    gradients = footprint.nbytes(footprint.trained(shards))
    optimizer = footprint.optimizer_bytes(make_optimizer(shards))
    root, inside = _gathered_bytes(meta_model, units, settings)
    whole = root + sum(inside)

    trained_elements = sum(p.numel() for p in footprint.trained(shards)) * settings.shards
    reduced = trained_elements * settings.reduced_in.itemsize
    # Once a step: gradients within a replica, then between replicas.
    sent = footprint.shared(reduced, settings.shards)
    sent += footprint.shared(reduced // settings.shards, settings.replicas, times=2)
    if settings.frees:
        # Units are gathered again for the backward pass, by every micro-batch.
        buffers = root + max(inside, default=0)
        sent_each = footprint.shared(root + 2 * sum(inside), settings.shards)
    else:
        buffers = whole
        sent += footprint.shared(whole, settings.shards)
        sent_each = 0

    memory = Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        buffers=buffers,
        host=0,
        sent=sent,
        sent_each=sent_each,
    )
    if not settings.offloads:
        return memory
    host = parameters + gradients + optimizer
    return replace(memory, parameters=0, gradients=0, optimizer=0, host=host)


def _gathered_bytes(
    meta_model: nn.Module, units: Mapping[str, nn.Module], settings: ShardingSettings
) -> tuple[int, list[int]]:
    """Return the bytes of the root's own gathered parameters, and those of each unit."""
    names = {id(parameter): name for name, parameter in meta_model.named_parameters()}
    counted: set[int] = set()
    sizes = []
    # Children come before their parents, which count the rest.
    for module in (*units.values(), meta_model):
        size = 0
        for parameter in module.parameters():
            if id(parameter) not in counted:
                counted.add(id(parameter))
                dtype = settings.gathered_in or parameter.dtype
                parts = settings.parts if names[id(parameter)] in settings.parted else 1
                size += _padded(parameter, settings.shards) // parts * dtype.itemsize
        sizes.append(size)
    return sizes[-1], sizes[:-1]


def _rows_of_shard(parameter: nn.Parameter, shards: int) -> int:
    """Return the rows of the largest shard, rounded up."""
    return -(-parameter.shape[0] // shards)


def _padded(parameter: nn.Parameter, shards: int) -> int:
    """Return the elements of a gathered parameter, with the padding of its shards."""
    if not parameter.dim():
        return 1
    row_size = parameter.numel() // parameter.shape[0]
    return row_size * _rows_of_shard(parameter, shards) * shards

"""The L2 norm of gradients, added in fp64: right for any size, and equal over any shards.

torch adds the squares of an fp32 tensor on a CPU in few fp32 lanes, so the norm of a dense gradient
of 23 million elements is off by 1e-3, and two shards of it say another norm than the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 2**15
"""Elements that are widened to fp64 at a time.

256 KiB stay in a core's cache and raise no peak of memory.
"""
SMALL = 2**14
"""Tensors with fewer elements are joined first: each operation costs more than its elements."""


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all ``tensors`` together, an fp32 scalar; DTensors count whole."""
    return squared_norm(tensors).sqrt().float()


@torch.no_grad()
def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, an fp64 scalar on the device of the first tensor.

    DTensors count whole: every rank of their mesh calls, and each kind of sharding costs
    one sum over ranks.
    """
    # No function is called for each tensor: there may be hundreds, and this runs in every step.
    groups: list[list[Tensor]] = []
    small: list[Tensor] = []
    others: list[Tensor] = []
    waiting = elements = 0
    for tensor in tensors:
        # A tensor that stands for another one, as in a plan, has no values to widen.
        if (
            type(tensor) is not Tensor
            or tensor.device.type != "cpu"
            or tensor.is_sparse
            or tensor.is_complex()
        ):
            others.append(tensor)
            continue
        flat = tensor.detach().reshape(-1)
        count = flat.numel()
        elements += count
        if count >= SMALL:
            groups.append([flat])
            continue
        small.append(flat)
        waiting += count
        if waiting >= CHUNK:
            groups.append(small)
            small = []
            waiting = 0
    if small:
        groups.append(small)
    squares = []
    # torch's own kernel would widen a whole tensor first, eight times as slowly.
    buffer = torch.empty(min(CHUNK, elements), dtype=torch.float64)
    for group in groups:
        joined = group[0] if len(group) == 1 else torch.cat(group)
        for chunk in torch.split(joined, CHUNK):
            wide = buffer[: chunk.numel()].copy_(chunk)
            squares.append(torch.dot(wide, wide))
    if others:
        squares += _squares_of_others(others)
    if not squares:
        return torch.zeros((), dtype=torch.float64)
    first = squares[0]
    for square in squares[1:]:
        first = first + square.to(first.device)
    return first


@torch.no_grad()
def scale(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply ``tensors`` in place; of DTensors, what this rank holds."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.is_sparse:
            local.mul_(factor.to(local.device))
        else:
            by_device.setdefault(local.device, []).append(local)
    for device, locals_ in by_device.items():
        torch._foreach_mul_(locals_, factor.to(device))


def _squares_of_others(tensors: list[Tensor]) -> list[Tensor]:
    """Return sums of squares of DTensors, and of tensors elsewhere, sparse or complex."""
    plain: list[Tensor] = []
    on_device: dict[torch.device, list[Tensor]] = {}
    sharded: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for tensor in tensors:
        if hasattr(tensor, "placements"):
            local, mesh, dimensions = local_part(tensor)
            sharded.setdefault((mesh, dimensions), []).append(local)
            continue
        values = tensor.coalesce().values() if tensor.is_sparse else tensor.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        if type(values) is Tensor and values.device.type == "cpu":
            plain.append(values)
        else:
            on_device.setdefault(values.device, []).append(values)
    squares = [squared_norm(plain)] if plain else []
    for values_there in on_device.values():
        norms = torch._foreach_norm(values_there, 2, dtype=torch.float64)
        squares.append(torch.stack(norms).square().sum())
    for (mesh, dimensions), locals_ in sharded.items():
        square = squared_norm(locals_)
        for dimension in dimensions:
            dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return squares


def local_part(tensor: Any) -> tuple[Tensor, Any, tuple[int, ...]]:
    """Return this rank's part of a DTensor, its mesh, and the dimensions that shard it."""
    if any(placement.is_partial() for placement in tensor.placements):
        tensor = _without_partial_sums(tensor)
    mesh = tensor.device_mesh
    dimensions = []
    for dimension, placement in enumerate(tensor.placements):
        if mesh.shape[dimension] > 1 and not placement.is_replicate():
            dimensions.append(dimension)
    return tensor.to_local(), mesh, tuple(dimensions)


def _without_partial_sums(tensor: Any) -> Any:
    """Return a DTensor with the sums of values of which each rank has only a term."""
    # It takes long to import, and whoever has a DTensor has it.
    from torch.distributed.tensor import Replicate

    placements = [
        Replicate() if placement.is_partial() else placement for placement in tensor.placements
    ]
    return tensor.redistribute(placements=placements)

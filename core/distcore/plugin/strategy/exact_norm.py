"""The squared L2 norm of gradients, with the same bits for any shards of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distcore.plugin.strategy.gradient_norm import CHUNK, SMALL, local_part

MANTISSA = 53
"""Bits of an fp64 number."""


@torch.no_grad()
def exact_squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of fp32 ``gradients``, an fp64 scalar; DTensors count whole.

    Squares of fp32 numbers are exact in fp64. Each is split into a multiple of a coarse grid and
    one of a fine grid, which fp64 adds without rounding, so no order and no partition matters. The
    grids follow from the largest element and the number of all elements, which no shards change.
    """
    # DTensors of one mesh are added up over its ranks together.
    locals_by_mesh: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh: Any = None
        dimensions: tuple[int, ...] = ()
        local = gradient.detach()
        if hasattr(gradient, "placements"):
            local, mesh, dimensions = local_part(gradient)
        locals_by_mesh.setdefault((mesh, dimensions), []).append(local.reshape(-1))
    greatest = 0.0
    for (mesh, dimensions), locals_ in locals_by_mesh.items():
        greatest_there = _over_ranks(_extremes(locals_), mesh, dimensions, dist.ReduceOp.MAX)
        largest, has_nan = greatest_there.tolist()
        if has_nan:
            return torch.tensor(math.nan, dtype=torch.float64)
        greatest = max(greatest, largest)
    if greatest in (0.0, math.inf):
        return torch.tensor(greatest, dtype=torch.float64)
    count = sum(gradient.numel() for gradient in gradients)
    bits_of_count = count.bit_length()
    _, exponent = math.frexp(greatest)
    bits_of_sum = 2 * exponent + bits_of_count  # all squares together are below 2**bits_of_sum
    # Near these, the fp64 numbers are the grids.
    coarse = 1.5 * 2.0**bits_of_sum
    fine = 1.5 * 2.0 ** (bits_of_sum - MANTISSA + bits_of_count)
    total = torch.zeros(2, dtype=torch.float64)
    for (mesh, dimensions), locals_ in locals_by_mesh.items():
        total += _over_ranks(_sums(locals_, coarse, fine), mesh, dimensions, dist.ReduceOp.SUM)
    return total.sum()


def _extremes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute element, and 1 if there is a NaN, which a maximum may hide."""
    some = [tensor for tensor in tensors if tensor.numel()]
    if not some:
        return torch.zeros(2, dtype=torch.float64)
    bounds = [bound for tensor in some for bound in torch.aminmax(tensor)]  # faster than norms
    largest = torch.stack(bounds).abs().max().double()
    return torch.stack([largest.nan_to_num(0.0, posinf=math.inf), largest.isnan().double()])


def _sums(tensors: Sequence[Tensor], coarse: float, fine: float) -> Tensor:
    """Return the sum of squares in two parts, the multiples of each of two grids."""
    large = [tensor for tensor in tensors if tensor.numel() >= SMALL]
    small = [tensor for tensor in tensors if tensor.numel() < SMALL]
    # Small tensors are joined first: each operation costs more than their elements.
    joined = [torch.cat(small)] if small else []
    sums = torch.zeros(2, dtype=torch.float64)
    squares, tops = torch.empty(2, CHUNK, dtype=torch.float64)
    for chunk in _chunks([*large, *joined]):
        square, top = squares[: chunk.numel()], tops[: chunk.numel()]
        square.copy_(chunk).square_()
        torch.add(square, coarse, out=top).sub_(coarse)
        sums[0] += top.sum()
        sums[1] += square.sub_(top).add_(fine).sub_(fine).sum()
    return sums


def _chunks(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield the elements of ``tensors``, so many at a time that they stay in a core's cache."""
    for tensor in tensors:
        yield from torch.split(tensor, CHUNK)


def _over_ranks(
    values: Tensor, mesh: Any, dimensions: Sequence[int], operation: dist.ReduceOp.RedOpType
) -> Tensor:
    """Return ``values`` of all ranks with other shards, joined by ``operation``."""
    for dimension in dimensions:
        dist.all_reduce(values, op=operation, group=mesh.get_group(dimension))
    return values

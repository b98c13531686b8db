"""Collectives over torch's default process group for logs and evaluations: sums, and gathered rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over ranks, on every rank, same shape and dtype; ``values`` is not changed."""
    total = values.clone()
    dist.all_reduce(total)
    return total


def gather_rows(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the rows of all ranks in rank order; the same result on every rank.

    Each tensor has shape ``(n_r, …)`` on rank r, where n_r may be 0, and ``(sum of n_r, …)`` in the result; dtypes
    are kept. Needs one collective for all lengths, and one per tensor, padded to the longest n_r.
    """
    if not outputs:
        return {}
    names = sorted(outputs)
    mine = torch.tensor([len(outputs[name]) for name in names], device=outputs[names[0]].device)
    lengths = _all_gather(mine)
    return {name: _gather(outputs[name], [int(row[i]) for row in lengths]) for i, name in enumerate(names)}


def _gather(rows: Tensor, lengths: list[int]) -> Tensor:
    longest = max(lengths)  # all_gather takes the same shape from every rank
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    if longest == 0:  # on every rank, so all of them leave out the collective
        return padded
    return torch.cat([part[:length] for part, length in zip(_all_gather(padded), lengths, strict=True)])


def _all_gather(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts

"""Batch normalization over the global batch: equal for any number of ranks and any micro-batches.

The statistics of a layer follow from the outputs of the layer below for all rows of a step. Each rank therefore
computes its rows in one micro-batch, and ranks add up their sums: for the mean, for the variance, and in the backward
pass for the gradients of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from distcore.plugin.strategy.contract import Run


def is_global(run: Run) -> bool:
    """Return True if the model has batch normalization with running statistics, and ranks can compute it together.

    Each rank must have rows of its own and all layers, and the ranks a group.
    """
    world, parts = run.world, [part for part in run.module.modules() if isinstance(part, _BatchNorm)]
    joins = world.size == 1 or (world.group is not None and world.shards == world.size)
    return joins and run.capabilities.calls_any_time and bool(parts) and all(part.track_running_stats for part in parts)


@contextmanager
def use_global_statistics(run: Run) -> Iterator[None]:
    """Let batch normalization in training mode count the rows of all ranks inside the ``with`` block."""
    if run.world.group is None or not is_global(run):
        yield
        return
    add = run.world.group.sum

    @torch.compiler.disable
    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or running_mean is None or running_var is None:
            return _torch_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        wide, share = input.float(), 0.0 if run.tally.muted else 1.0  # rows of a padding micro-batch do not count
        axes, shape = [0, *range(2, wide.dim())], [1, -1] + [1] * (wide.dim() - 2)
        rows = wide.new_full((1,), wide.numel() / wide.shape[1])
        *_, total = sums = _Sum.apply(torch.cat([wide.sum(axes), rows]) * share, add)
        mean = sums[:-1] / total
        centered = wide - mean.view(shape)
        variance = _Sum.apply(centered.square().sum(axes) * share, add) / total
        if torch._C._current_graph_task_id() == -1:  # not in recomputation: once per step
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
        scale = (variance + eps).rsqrt() * (1.0 if weight is None else weight.float())
        normalized = centered * scale.view(shape)
        return (normalized if bias is None else normalized + bias.float().view(shape)).to(input.dtype)

    F.batch_norm = batch_norm
    try:
        yield
    finally:
        F.batch_norm = _torch_batch_norm


_torch_batch_norm = F.batch_norm


class _Sum(torch.autograd.Function):
    """The sum of values over ranks, and in the backward pass that of their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.add = add
        return add(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.add(gradient.contiguous()), None

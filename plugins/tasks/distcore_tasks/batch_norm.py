"""Batch normalization over the global batch: equal for any number of ranks and any micro-batches.

The statistics of a layer follow from the outputs of the layer below for all rows of a step. Each
rank therefore computes its rows in one micro-batch, and ranks add up their sums: for the mean, then
for the variance.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from distcore import (
    BatchPlan,
    ConfigError,
    MicroBatch,
    OptimizerFactory,
    PreparedModel,
    Run,
    Sampler,
    TaskError,
    hookimpl,
)

log = logging.getLogger("distcore")


class GlobalBatchNorm(_BatchNorm):
    """A layer whose statistics in training are those of the rows of all ranks."""

    is_global = True
    """Tells the core that results do not depend on micro-batches."""
    run: Run | None
    """The run, if it has several ranks."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``(n, channels, …)``; raises TaskError where the rows to normalize by have a
        single value of each channel.
        """
        reads_rows = self.training or self.running_mean is None
        # On this rank.
        is_single = reads_rows and input.dim() > 1 and input.numel() == input.shape[1]
        is_mixed = _has_two_dtypes(self)
        if not self.training and is_mixed:
            return self._evaluate_in_fp32(input)
        if not self.training or (self.run is None and not is_mixed):
            _refuse(is_single, self.training)
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        # Rows of a padding micro-batch do not count.
        share = 0.0 if self.run is not None and self.run.tally.muted else 1.0
        wide, axes = input.float(), [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        values = wide.new_full((1,), wide.numel() / wide.shape[1])  # of a channel
        sums = _sum(torch.cat([wide.sum(axes), values]) * share, self.run)
        mean, total = sums[:-1] / sums[-1], sums[-1]
        _refuse(is_single and float(total.detach()) <= 1, self.training)
        centered = wide - mean.view(shape)
        variance = _sum(centered.square().sum(axes) * share, self.run) / total
        # Once per step: not in recomputation, within the backward pass.
        if torch._C._current_graph_task_id() == -1:
            self._count(mean, variance, total)
        scale = (variance + self.eps).rsqrt() * (
            1.0 if self.weight is None else self.weight.float()
        )
        normalized = centered * scale.view(shape)
        return (normalized if self.bias is None else normalized + self.bias.float().view(shape)).to(
            input.dtype
        )

    def _evaluate_in_fp32(self, input: Tensor) -> Tensor:
        """Normalize by the running statistics where an engine has cast the weights alone."""
        weight, bias = (None if one is None else one.float() for one in (self.weight, self.bias))
        mean, variance = self.running_mean, self.running_var
        return batch_norm(input.float(), mean, variance, weight, bias, eps=self.eps).to(input.dtype)

    @torch.no_grad()
    def _count(self, mean: Tensor, variance: Tensor, values: Tensor) -> None:
        """Move the running statistics, if there are any, toward those of a step, of so many
        ``values`` a channel.
        """
        if not self.track_running_stats or self.running_mean is None:
            return
        assert self.num_batches_tracked is not None  # torch makes all three buffers, or none
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in (
            (self.running_mean, mean),
            (self.running_var, variance * (values / (values - 1))),
        ):
            assert running is not None
            running.lerp_(new.to(running.dtype), momentum)


def _has_two_dtypes(layer: _BatchNorm) -> bool:
    """Return True if torch's own function does not take a layer: weights in 16 bits, and
    running statistics in fp32, as an engine has them that casts parameters alone.
    """
    if layer.weight is None or layer.running_mean is None:
        return False
    return bool(layer.weight.dtype != layer.running_mean.dtype)


def _refuse(is_single: bool, in_training: bool) -> None:
    """Raise TaskError if there is a single value of each channel to normalize by."""
    if not is_single:
        return
    if in_training:
        rows, flag = "a step has one row (the last one of an epoch?)", "--global-batch-size"
    else:
        rows, flag = "a micro-batch of an evaluation has one row", "--micro-batch-size"
    raise TaskError(f"batch_norm: {rows}, and a variance needs two: choose another {flag}")


class BatchNorm:
    """Has the layers of a model that trains count the rows of all ranks, where
    the strategy allows it.
    """

    only_looks = True  # a step computes what one plain process does
    in_any_loop = True

    @hookimpl(wrapper=True)
    def wrap_model(
        self, run: Run, make_optimizer: OptimizerFactory | None
    ) -> Generator[None, PreparedModel, PreparedModel]:
        """Replace the class of each layer that computes as torch's does, and is not frozen.

        Raises ConfigError for such a layer where the strategy cannot join ranks and
        rows are computed apart.
        """
        prepared = yield
        for layer in run.module.modules() if make_optimizer else ():
            is_torchs = isinstance(layer, _BatchNorm) and type(layer).forward is _BatchNorm.forward
            is_frozen = hasattr(layer, "keeps_statistics")
            if is_frozen or not is_torchs:
                continue
            if _can_join(run):
                layer.__class__ = type(
                    f"Global{type(layer).__name__}", (GlobalBatchNorm, type(layer)), {}
                )
                layer.run = run if run.world.size > 1 else None  # type: ignore[assignment]
            elif run.world.shards * run.accumulation > 1:
                raise ConfigError(
                    f"strategy {run.config.strategy!r} cannot compute batch normalization over the"
                    " rows of a step; choose another, or have it over those of a micro-batch:"
                    " --set extensions.batch_norm=false"
                )
        return prepared

    @hookimpl(wrapper=True)
    def build_sampler(self, run: Run, plan: BatchPlan) -> Generator[None, Sampler, Sampler]:
        """Join the micro-batches of a rank in each training step of such a model."""
        sampler = yield
        is_training = plan.order in ("shuffled", "window")
        if not (
            is_training
            and any(isinstance(layer, GlobalBatchNorm) for layer in run.module.modules())
        ):
            return sampler
        if run.world.is_main:
            rows = -(-plan.global_batch // run.world.shards)
            log.info(
                "batch_norm: statistics over all rows of a step; a rank computes its %d rows at"
                " once",
                rows,
            )
        return partial(_joined, sampler)


def _can_join(run: Run) -> bool:
    """Return True if each rank has rows of its own and all layers, and the ranks have a group."""
    world = run.world
    has_ranks = world.size == 1 or (world.group is not None and world.shards == world.size)
    return has_ranks and run.capabilities.calls_any_time


def _joined(sampler: Sampler, epoch: int, step: int) -> Sequence[MicroBatch]:
    """Return the micro-batches of a step as one."""
    micros = sampler(epoch, step)
    rows = [micro.indices for micro in micros if not micro.is_padding]
    return [MicroBatch(np.concatenate(rows))] if rows else [replace(micros[0], last=True)]


def _sum(values: Tensor, run: Run | None) -> Tensor:
    """Return the sum of ``values`` over ranks, if there are several; its backward pass is one,
    too.
    """
    if run is None:
        return values
    return _Sum.apply(values, run)  # type: ignore[no-any-return, no-untyped-call]


class _Sum(torch.autograd.Function):
    """The sum over ranks, and in the backward pass that of the gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, run: Run) -> Tensor:
        ctx.group = run.world.group
        total: Tensor = ctx.group.sum(values)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradient), None

"""Compute the memory and the traffic of a rank at each ZeRO stage, before a run:
partitions with their padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from distcore import ConfigError, Memory, OptimizerFactory, RunConfig, footprint
from distcore_deepspeed.json_config import Tree, UserConfig
from distcore_deepspeed.library import DeepSpeedZeroConfig
from distcore_deepspeed.optimizers import optimizer_type
from distcore_deepspeed.resolve_config import resolve_section

MASTER = 4
"""Bytes of an element of the fp32 master weights."""


@dataclass(frozen=True)
class _Sizes:
    """The sizes that both kinds of partitions depend on."""

    zero: DeepSpeedZeroConfig
    """DeepSpeed's section, its own defaults filled in."""
    ranks: int
    element: int
    """Bytes of an element of the model."""
    gradient: int
    """Bytes of an element of the gradients that are kept."""
    groups: list[list[nn.Parameter]]
    """The parameters of the optimizer, by group."""
    optimizer_bytes: Callable[[list[int]], int]
    """Map the elements of the partitions, one number per group, to the
    bytes of the optimizer's state.
    """


def zero_memory(
    user: UserConfig,
    config: RunConfig,
    meta_model: nn.Module,
    ranks: int,
    make_optimizer: OptimizerFactory,
) -> Memory:
    """Return the memory and the traffic of each rank. ``meta_model`` is on the meta device.

    Raises ConfigError, one line, for settings whose memory is not known: stage 1 in bf16, which has
    another kind of optimizer, DeepSpeed's Lamb, and state on NVMe.
    """
    kind = optimizer_type(config, user)
    if kind not in (None, "Adam", "AdamW"):
        raise ConfigError(f"optimizer {kind}: the memory of DeepSpeed's optimizer is not known")
    if user.stage == 0:
        memory = footprint.whole(meta_model, make_optimizer)
        return replace(memory, sent=footprint.shared(memory.gradients, ranks, times=2))
    if user.stage == 1 and config.precision == "bf16":
        raise ConfigError("stage 1 in bf16: its memory is not known, unlike stage 2's")
    if not user.keeps_masters:
        raise ConfigError("offload to nvme: the memory that stays in use is not known")
    element = 4 if config.precision == "fp32" else 2
    sizes = _Sizes(
        zero=DeepSpeedZeroConfig(
            **_without_idle_offload(resolve_section(user, config, ranks, meta_model))
        ),
        ranks=ranks,
        element=element,
        gradient=2 if config.precision == "fp16" else 4,
        groups=[group["params"] for group in make_optimizer(meta_model).param_groups],
        optimizer_bytes=lambda partitions: _state(make_optimizer(meta_model), partitions),
    )
    if user.stage == 3:
        return _per_parameter_memory(sizes, meta_model)
    return _flat_group_memory(sizes, meta_model, user.stage)


def _flat_group_memory(sizes: _Sizes, meta_model: nn.Module, stage: int) -> Memory:
    """Return the memory of stages 1 and 2: each group is one flat buffer, cut into
    one partition per rank.
    """
    step = 16 // sizes.element if sizes.zero.parameter_alignment else 1
    flat = [_aligned_size(group, step, 2 * sizes.ranks) for group in sizes.groups]
    partitions = [size // sizes.ranks for size in flat]
    frozen = sum(
        p.numel() * _element(sizes, p) for p in meta_model.parameters() if not p.requires_grad
    )
    whole, part = sum(flat) * sizes.element, sum(partitions)
    buckets = 2 if sizes.zero.overlap_comm else 1
    reduced = footprint.shared(whole, sizes.ranks, times=2)
    memory = Memory(
        parameters=whole + frozen,
        gradients=part * sizes.gradient,
        optimizer=sizes.optimizer_bytes(partitions),
        copies=part * MASTER,
        buffers=(
            buckets * sizes.zero.reduce_bucket_size * sizes.element
            if sizes.zero.contiguous_gradients
            else 0
        ),
        sent=footprint.shared(whole, sizes.ranks) + (reduced if stage == 1 else 0),
        sent_each=0 if stage == 1 else reduced,
    )
    if not sizes.zero.offload_optimizer:
        return memory
    # Gradients in fp32, and a buffer through which updated weights return to the device.
    host = part * (MASTER + sizes.element) + memory.copies + memory.optimizer
    return replace(memory, gradients=0, optimizer=0, copies=0, host=host)


def _per_parameter_memory(sizes: _Sizes, meta_model: nn.Module) -> Memory:
    """Return the memory of stage 3: each parameter is cut into equal, padded partitions; small
    ones also stay whole.
    """
    zero, ranks = sizes.zero, sizes.ranks
    partitions = [sum(-(-p.numel() // ranks) for p in group) for group in sizes.groups]
    every = list(meta_model.parameters())
    sharded = sum(-(-p.numel() // ranks) * _element(sizes, p) for p in every)
    whole = sum(
        p.numel() * _element(sizes, p)
        for p in every
        if p.numel() <= zero.param_persistence_threshold
    )
    gathered = ranks * sharded - whole
    again = 2 if sum(p.numel() for p in every) > zero.max_live_parameters else 1
    part = sum(partitions)
    memory = Memory(
        parameters=sharded + whole,
        starting=max(p.numel() * _element(sizes, p) for p in every),
        gradients=part * sizes.gradient,
        optimizer=sizes.optimizer_bytes(partitions),
        copies=part * MASTER,
        buffers=zero.reduce_bucket_size * sizes.element if zero.contiguous_gradients else 0,
        sent=footprint.shared(whole, ranks),
        sent_each=footprint.shared(part * ranks * sizes.element + again * gathered, ranks),
    )
    host = 0
    if zero.offload_optimizer:
        host += memory.gradients + memory.optimizer + memory.copies
        memory = replace(memory, gradients=0, optimizer=0, copies=0)
    if zero.offload_param:
        host += sharded
        memory = replace(memory, parameters=whole)
    return replace(memory, host=host)


def _element(sizes: _Sizes, parameter: nn.Parameter) -> int:
    """Return the bytes of an element: a frozen weight may be narrower than what is trained."""
    return min(sizes.element, parameter.element_size())


def _aligned_size(group: list[nn.Parameter], step: int, whole: int) -> int:
    """Return the elements of a group's buffer: all but the last parameter padded to ``step``,
    the sum to ``whole``.
    """
    *before, last = (p.numel() for p in group)
    size = sum(-(-numel // step) * step for numel in before) + last
    return -(-size // whole) * whole


def _state(optimizer: torch.optim.Optimizer, partitions: list[int]) -> int:
    for group, size in zip(optimizer.param_groups, partitions, strict=True):
        group["params"] = [nn.Parameter(torch.empty(size, device="meta"))]
    return footprint.optimizer_bytes(optimizer)


def _without_idle_offload(section: Tree) -> Tree:
    """Return the section without the offload entries that offload nothing."""
    offload = ("offload_optimizer", "offload_param")
    return {
        k: v for k, v in section.items() if not (k in offload and v.get("device") in (None, "none"))
    }

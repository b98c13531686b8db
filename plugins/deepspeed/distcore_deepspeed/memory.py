"""What a rank holds and sends at each ZeRO stage, known before a run: DeepSpeed's partitions with their padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from distcore import ConfigError, Memory, OptimizerFactory, RunConfig, footprint
from distcore_deepspeed.derived import resolved_section
from distcore_deepspeed.json_config import Tree, UserConfig
from distcore_deepspeed.library import DeepSpeedZeroConfig
from distcore_deepspeed.optimizers import optimizer_type

MASTER = 4
"""Bytes of an element that is stepped."""


@dataclass(frozen=True)
class _Sizes:
    """What both kinds of partitions are computed from."""

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
    """The optimizer's state for partitions of so many elements, one per group."""


def planned(
    user: UserConfig, config: RunConfig, skeleton: nn.Module, ranks: int, make_optimizer: OptimizerFactory
) -> Memory:
    """Return what each rank holds and sends; ``skeleton`` is on the meta device.

    Raises ConfigError, one line, for what is not known: stage 1 in bf16, for which DeepSpeed has an optimizer of its
    own kind, its Lamb, and state on NVMe.
    """
    kind = optimizer_type(config, user)
    if kind not in (None, "Adam", "AdamW"):
        raise ConfigError(f"optimizer {kind}: what DeepSpeed's keeps is not known")
    if user.stage == 0:
        held = footprint.whole(skeleton, make_optimizer)
        return replace(held, sent=footprint.shared(held.gradients, ranks, times=2))
    if user.stage == 1 and config.precision == "bf16":
        raise ConfigError("stage 1 in bf16: what it holds is not known; stage 2 is")
    if not user.keeps_masters:
        raise ConfigError("offload to nvme: what stays in memory is not known")
    element = 4 if config.precision == "fp32" else 2
    sizes = _Sizes(
        zero=DeepSpeedZeroConfig(**_without_place(resolved_section(user, config, ranks, skeleton))),
        ranks=ranks,
        element=element,
        gradient=2 if config.precision == "fp16" else 4,
        groups=[group["params"] for group in make_optimizer(skeleton).param_groups],
        optimizer_bytes=lambda partitions: _state(make_optimizer(skeleton), partitions),
    )
    if user.stage == 3:
        return _each_parameter(sizes, skeleton)
    return _flat_groups(sizes, skeleton, user.stage)


def _flat_groups(sizes: _Sizes, skeleton: nn.Module, stage: int) -> Memory:
    """Stages 1 and 2: the parameters of a group in one buffer, cut in as many partitions as there are ranks."""
    step = 16 // sizes.element if sizes.zero.parameter_alignment else 1
    flat = [_aligned(group, step, 2 * sizes.ranks) for group in sizes.groups]
    partitions = [size // sizes.ranks for size in flat]
    frozen = sum(p.numel() for p in skeleton.parameters() if not p.requires_grad)
    whole, part = sum(flat) * sizes.element, sum(partitions)
    buckets = 2 if sizes.zero.overlap_comm else 1
    reduced = footprint.shared(whole, sizes.ranks, times=2)
    held = Memory(
        parameters=whole + frozen * sizes.element,
        gradients=part * sizes.gradient,
        optimizer=sizes.optimizer_bytes(partitions),
        copies=part * MASTER,
        buffers=buckets * sizes.zero.reduce_bucket_size * sizes.element if sizes.zero.contiguous_gradients else 0,
        sent=footprint.shared(whole, sizes.ranks) + (reduced if stage == 1 else 0),
        sent_each=0 if stage == 1 else reduced,
    )
    if not sizes.zero.offload_optimizer:
        return held
    # Gradients in fp32, and a buffer through which updated weights go back to the device.
    host = part * (MASTER + sizes.element) + held.copies + held.optimizer
    return replace(held, gradients=0, optimizer=0, copies=0, host=host)


def _each_parameter(sizes: _Sizes, skeleton: nn.Module) -> Memory:
    """Stage 3: each parameter cut in equal partitions, the last one padded; small ones also stay whole."""
    zero, ranks = sizes.zero, sizes.ranks
    partitions = [sum(-(-p.numel() // ranks) for p in group) for group in sizes.groups]
    every = list(skeleton.parameters())
    held_parts = sum(-(-p.numel() // ranks) for p in every) * sizes.element
    whole = sum(p.numel() for p in every if p.numel() <= zero.param_persistence_threshold) * sizes.element
    gathered = ranks * held_parts - whole
    again = 2 if sum(p.numel() for p in every) > zero.max_live_parameters else 1
    part = sum(partitions)
    held = Memory(
        parameters=held_parts + whole,
        gradients=part * sizes.gradient,
        optimizer=sizes.optimizer_bytes(partitions),
        copies=part * MASTER,
        buffers=zero.reduce_bucket_size * sizes.element if zero.contiguous_gradients else 0,
        sent=footprint.shared(whole, ranks),
        sent_each=footprint.shared(part * ranks * sizes.element + again * gathered, ranks),
    )
    host = 0
    if zero.offload_optimizer:
        host += held.gradients + held.optimizer + held.copies
        held = replace(held, gradients=0, optimizer=0, copies=0)
    if zero.offload_param:
        host += held_parts
        held = replace(held, parameters=whole)
    return replace(held, host=host)


def _aligned(group: list[nn.Parameter], step: int, whole: int) -> int:
    """Return the elements of a group's buffer: each parameter but the last padded to ``step``, all to ``whole``."""
    *before, last = (p.numel() for p in group)
    size = sum(-(-numel // step) * step for numel in before) + last
    return -(-size // whole) * whole


def _state(optimizer: torch.optim.Optimizer, partitions: list[int]) -> int:
    for group, size in zip(optimizer.param_groups, partitions, strict=True):
        group["params"] = [nn.Parameter(torch.empty(size, device="meta"))]
    return footprint.optimizer_bytes(optimizer)


def _without_place(section: Tree) -> Tree:
    """Leave out where offloading to NVMe would write, and sections that say that nothing is offloaded."""
    none = ("offload_optimizer", "offload_param")
    return {k: v for k, v in section.items() if not (k in none and v.get("device") in (None, "none"))}

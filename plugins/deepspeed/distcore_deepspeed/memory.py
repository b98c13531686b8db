"""Compute the memory and the traffic of a rank at each ZeRO stage, before a run.

Partitions count with their padding.
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
    """Map the elements of the partitions, one number per group, to the optimizer's bytes."""


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
    section = resolve_section(user, config, ranks, meta_model)
    sizes = _Sizes(
        zero=DeepSpeedZeroConfig(**_without_idle_offload(section)),
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
    """Return the memory of stages 1 and 2.

    Each group is one flat buffer, cut into one partition per rank.
    """
    step = 16 // sizes.element if sizes.zero.parameter_alignment else 1
    flat = [_aligned_size(group, step, 2 * sizes.ranks) for group in sizes.groups]
    partitions = [size // sizes.ranks for size in flat]
    frozen_parameters = [p for p in meta_model.parameters() if not p.requires_grad]
    frozen = sum(p.numel() * _element(sizes, p) for p in frozen_parameters)
    whole = sum(flat) * sizes.element
    part = sum(partitions)
    bucket_elements = 0
    if sizes.zero.contiguous_gradients:
        buckets = 2 if sizes.zero.overlap_comm else 1
        bucket_elements = buckets * sizes.zero.reduce_bucket_size
    reduced = footprint.shared(whole, sizes.ranks, times=2)
    memory = Memory(
        parameters=whole + frozen,
        gradients=part * sizes.gradient,
        optimizer=sizes.optimizer_bytes(partitions),
        copies=part * MASTER,
        buffers=bucket_elements * sizes.element,
        sent=footprint.shared(whole, sizes.ranks) + (reduced if stage == 1 else 0),
        sent_each=0 if stage == 1 else reduced,
    )
    if not sizes.zero.offload_optimizer:
        return memory
    # Gradients in fp32, and a buffer through which updated weights return to the device.
    host = part * (MASTER + sizes.element) + memory.copies + memory.optimizer
    return replace(memory, gradients=0, optimizer=0, copies=0, host=host)


def _per_parameter_memory(sizes: _Sizes, meta_model: nn.Module) -> Memory:
    """Return the memory of stage 3.

    Each parameter is cut into equal, padded partitions; small ones also stay whole.
    """
    zero, ranks = sizes.zero, sizes.ranks
    partitions = [sum(_partition_size(p, ranks) for p in group) for group in sizes.groups]
    parameters = list(meta_model.parameters())
    sharded = sum(_partition_size(p, ranks) * _element(sizes, p) for p in parameters)
    small = [p for p in parameters if p.numel() <= zero.param_persistence_threshold]
    whole = sum(p.numel() * _element(sizes, p) for p in small)
    gathered = ranks * sharded - whole
    # With more elements than DeepSpeed keeps whole, they are gathered again in the backward pass.
    is_released = sum(p.numel() for p in parameters) > zero.max_live_parameters
    gatherings = 2 if is_released else 1
    part = sum(partitions)
    memory = Memory(
        parameters=sharded + whole,
        starting=max(p.numel() * _element(sizes, p) for p in parameters),
        gradients=part * sizes.gradient,
        optimizer=sizes.optimizer_bytes(partitions),
        copies=part * MASTER,
        buffers=zero.reduce_bucket_size * sizes.element if zero.contiguous_gradients else 0,
        sent=footprint.shared(whole, ranks),
        sent_each=footprint.shared(part * ranks * sizes.element + gatherings * gathered, ranks),
    )
    host = 0
    if zero.offload_optimizer:
        host += memory.gradients + memory.optimizer + memory.copies
        memory = replace(memory, gradients=0, optimizer=0, copies=0)
    if zero.offload_param:
        host += sharded
        memory = replace(memory, parameters=whole)
    return replace(memory, host=host)


def _partition_size(parameter: nn.Parameter, ranks: int) -> int:
    """Return the elements of each partition of a parameter at stage 3, rounded up."""
    return -(-parameter.numel() // ranks)


def _element(sizes: _Sizes, parameter: nn.Parameter) -> int:
    """Return the bytes of an element: a frozen weight may be narrower than what is trained."""
    return min(sizes.element, parameter.element_size())


def _aligned_size(group: list[nn.Parameter], step: int, whole: int) -> int:
    """Return the elements of a group's buffer.

    All but the last parameter are padded to multiples of ``step``, the sum to one of ``whole``.
    """
    *before, last = [p.numel() for p in group]
    size = sum(_padded(numel, step) for numel in before) + last
    return _padded(size, whole)


def _padded(size: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is not less than ``size``."""
    return -(-size // multiple) * multiple


def _state(optimizer: torch.optim.Optimizer, partitions: list[int]) -> int:
    """Return the bytes of the state of an optimizer of partitions, one for each of its groups."""
    for group, size in zip(optimizer.param_groups, partitions, strict=True):
        group["params"] = [nn.Parameter(torch.empty(size, device="meta"))]
    return footprint.optimizer_bytes(optimizer)


def _without_idle_offload(section: Tree) -> Tree:
    """Return the section without the offload entries that offload nothing."""
    in_use: Tree = {}
    for key, value in section.items():
        is_offload = key in ("offload_optimizer", "offload_param")
        if is_offload and value.get("device") in (None, "none"):
            continue
        in_use[key] = value
    return in_use

"""Where DeepSpeed keeps the fp32 weights and the optimizer's state of each parameter, stage by stage.

Stage 0 keeps the parameters themselves, 1 and 2 flat buffers cut in as many partitions as there are ranks, 3
partitions of each parameter. What Accelerate prepared is DeepSpeed's engine, so its books are the ones to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distcore import Piece, Run, SavedState, State, defaults, flat


def save(run: Run) -> State:
    """Master weights and optimizer state of this rank's parts; the rest of the model as it is."""
    return dict(_rest(run)) | flat.save(parts(run), run.optimizer)


@torch.no_grad()
def load(run: Run, saved: SavedState) -> bool:
    """Put the saved weights into the model and its master copies, and the saved state into the optimizer."""
    for name, tensor in defaults.model_state(run).items():
        _write(tensor, name, saved)
    flat.load(parts(run), run.optimizer, saved)
    return True


def parts(run: Run) -> Iterator[flat.Part]:
    """This rank's parts, in the same order on every rank."""
    optimizer, names = getattr(run.model, "optimizer", None), {p: name for name, p in run.module.named_parameters()}
    for masters, groups, place in _books(run, optimizer):
        for master, group in zip(masters, groups, strict=True):
            for parameter in group:
                offset, start, count = place(parameter)
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                yield flat.Part(names[parameter], master, offset, start, count, shape, whole=master is parameter)


Place = Callable[[nn.Parameter], tuple[int, int, int]]
"""Offset in the master buffer, start in the parameter, number of elements."""


def _books(run: Run, optimizer: Any) -> Iterator[tuple[list[Tensor], list[list[nn.Parameter]], Place]]:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        yield optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, lambda p: _partition(optimizer, p)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
        yield optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, _fragment
    elif hasattr(optimizer, "fp32_groups_flat_partition"):  # stage 1 in bf16
        yield optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, _fragment
    elif run.optimizer is not None:
        trained = [p for group in run.optimizer.param_groups for p in group["params"]]
        yield trained, [[p] for p in trained], lambda p: (0, 0, p.numel())


def _partition(optimizer: Any, parameter: Any) -> tuple[int, int, int]:
    """Stage 3 cuts each parameter in equal partitions; the last ones may be padded, or nothing but padding."""
    _, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(size * parameter.ds_process_group.rank(), parameter.ds_numel)
    return offset, start, min(size, parameter.ds_numel - start)


def _fragment(parameter: Any) -> tuple[int, int, int]:
    """Stages 1 and 2 cut the flat buffer of a group, wherever that falls in a parameter."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return 0, 0, 0
    return mapping.hp_fragment_address.start, mapping.lp_fragment_address.start, mapping.hp_fragment_address.numel


def _rest(run: Run) -> Iterator[tuple[str, Tensor | Piece]]:
    """Buffers, and parameters that are not trained."""
    trained = {f"model/{part.name}" for part in parts(run)}
    tensor: Any
    for name, tensor in defaults.model_state(run).items():
        if name in trained:
            continue
        if not hasattr(tensor, "ds_tensor"):
            yield name, tensor.detach()
        elif (local := _local(tensor)) is not None:
            values, start = local
            yield name, Piece(values, start, tuple(tensor.ds_shape))


def _local(parameter: Any) -> tuple[Tensor, int] | None:
    """This rank's partition of a parameter at stage 3, without padding, and its start; ``None`` if it has none."""
    partition = parameter.ds_tensor.detach().reshape(-1)
    start = partition.numel() * parameter.ds_process_group.rank()
    count = min(partition.numel(), parameter.ds_numel - start)
    return (partition.narrow(0, 0, count), start) if count > 0 else None


def _write(tensor: Any, name: str, saved: SavedState) -> None:
    """Write into what forward reads."""
    if not hasattr(tensor, "ds_tensor"):
        tensor.copy_(saved[name])
        return
    if (local := _local(tensor)) is not None:
        values, start = local
        values.copy_(saved.piece(name, start, len(values)))
    if tensor.numel() == tensor.ds_numel:  # small ones stay gathered between steps
        tensor.data.copy_(saved[name])

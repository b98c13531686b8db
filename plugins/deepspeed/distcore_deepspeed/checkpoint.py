"""DeepSpeed's partitions in checkpoints: fp32 master weights and optimizer state of this rank, by neutral name.

Where they lie depends on the stage: at 0 the parameters themselves; at 1 and 2 flat buffers, one per parameter group,
cut in as many partitions as there are ranks; at 3 partitions of each parameter. DeepSpeed's ``safe_get_full_*`` are
not used: they gather what they return, miss the state of the second parameter group, and know no step count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distcore import Piece, Progress, Run, SavedState, State, defaults, flat_buffers

Locate = Callable[[nn.Parameter], tuple[int, int, int]]
"""Of this rank's fragment of a parameter: offset in the master buffer, start in the flattened parameter, elements."""


def save(run: Run) -> State:
    """Return master weights and optimizer state of this rank's partitions, and the rest of the model as it is."""
    return dict(_untrained(run)) | flat_buffers.save(parts(run), run.optimizer)


@torch.no_grad()
def load(run: Run, saved: SavedState, progress: Progress) -> bool:
    """Load the model, its master weights, the optimizer's state and the place in DeepSpeed's schedule; always true."""
    for name, tensor in defaults.model_state(run).items():
        _write(tensor, name, saved)
    its_own = type(run.optimizer).__module__.startswith("deepspeed.")
    flat_buffers.load(parts(run), run.optimizer, saved, int if its_own else None)
    scheduler = getattr(run.model, "lr_scheduler", None)
    if scheduler is not None and (steps := _steps_taken(saved, progress)):
        scheduler.step(steps - 1)  # it counts from -1
    return True


def parts(run: Run) -> Iterator[flat_buffers.Part]:
    """Yield this rank's parts of the trained parameters, in the same order on every rank."""
    optimizer, names = getattr(run.model, "optimizer", None), {p: name for name, p in run.module.named_parameters()}
    for masters, groups, locate in _master_weights(run, optimizer):
        for master, group in zip(masters, groups, strict=True):
            for parameter in group:
                offset, start, count = locate(parameter)
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                yield flat_buffers.Part(
                    names[parameter], master, offset, start, count, shape, whole=master is parameter
                )


def _steps_taken(saved: SavedState, progress: Progress) -> int:
    """Optimizer steps that a checkpoint's optimizer has taken; those of the run if it does not count them."""
    counts = (float(saved[name]) for name in saved if name.endswith(f"/{flat_buffers.STEP}"))
    return int(max(counts, default=progress.step))


def _master_weights(run: Run, optimizer: Any) -> Iterator[tuple[list[Tensor], list[list[nn.Parameter]], Locate]]:
    """Yield the fp32 tensors that are stepped, the parameters in each, and where in it a parameter lies."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        yield optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, lambda p: _partition_of(optimizer, p)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
        yield optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, _fragment_of
    elif hasattr(optimizer, "fp32_groups_flat_partition"):  # stage 1 in bf16
        yield optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, _fragment_of
    elif run.optimizer is not None:
        trained = [p for group in run.optimizer.param_groups for p in group["params"]]
        yield trained, [[p] for p in trained], lambda p: (0, 0, p.numel())


def _partition_of(optimizer: Any, parameter: Any) -> tuple[int, int, int]:
    """Stage 3 cuts each parameter in equal partitions; the last ones may be padded, or nothing but padding."""
    _, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(size * parameter.ds_process_group.rank(), parameter.ds_numel)
    return offset, start, min(size, parameter.ds_numel - start)


def _fragment_of(parameter: Any) -> tuple[int, int, int]:
    """Stages 1 and 2 cut the flat buffer of a group, wherever the cut falls in a parameter."""
    mapping = parameter._hp_mapping
    if mapping is None:  # all of it is in other ranks' partitions
        return 0, 0, 0
    return mapping.hp_fragment_address.start, mapping.lp_fragment_address.start, mapping.hp_fragment_address.numel


def _untrained(run: Run) -> Iterator[tuple[str, Tensor | Piece]]:
    """Yield buffers, and parameters that are not trained."""
    trained = {f"model/{part.name}" for part in parts(run)}
    tensor: Any
    for name, tensor in defaults.model_state(run).items():
        if name in trained:
            continue
        if not hasattr(tensor, "ds_tensor"):
            yield name, tensor.detach()
        elif (local := _local_partition(tensor)) is not None:
            values, start = local
            yield name, Piece(values, start, tuple(tensor.ds_shape))


def _local_partition(parameter: Any) -> tuple[Tensor, int] | None:
    """This rank's partition of a parameter at stage 3, without padding, and its start; ``None`` if it has none."""
    partition = parameter.ds_tensor.detach().reshape(-1)
    start = partition.numel() * parameter.ds_process_group.rank()
    count = min(partition.numel(), parameter.ds_numel - start)
    return (partition.narrow(0, 0, count), start) if count > 0 else None


def _write(tensor: Any, name: str, saved: SavedState) -> None:
    """Write the saved values of a parameter or buffer into what the forward pass reads."""
    if not hasattr(tensor, "ds_tensor"):
        tensor.copy_(saved[name])
        return
    if (local := _local_partition(tensor)) is not None:
        values, start = local
        values.copy_(saved.piece(name, start, len(values)))
    if tensor.numel() == tensor.ds_numel:  # small ones stay gathered between steps
        tensor.data.copy_(saved[name])

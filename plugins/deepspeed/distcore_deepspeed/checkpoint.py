"""DeepSpeed's partitions in checkpoints: this rank's fp32 masters and optimizer state, by name.

Master weights are the parameters themselves at stage 0. At stages 1 and 2 they are flat buffers,
one per parameter group, cut into one partition per rank. At stage 3 each parameter has partitions.
DeepSpeed's ``safe_get_full_*`` are not used: they gather whole tensors, miss the state of the
second parameter group, and know no step count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distcore import Piece, Progress, Run, SavedState, State, defaults
from distcore_deepspeed import flat_buffers

Locate = Callable[[nn.Parameter], tuple[int, int, int]]
"""Map a parameter to this rank's fragment.

The fragment is its offset in the master buffer, its start in the flat parameter, and its number of
elements.
"""


def save(run: Run) -> State:
    """Return masters and optimizer state of this rank's partitions, and untrained tensors."""
    return dict(_frozen_entries(run)) | flat_buffers.save(parts(run), run.optimizer)


def computed_weights(run: Run) -> State:
    """Return the partitions at stage 3 that forward passes gather.

    The masters, which are saved, are other tensors. Partitions on NVMe are left out.
    """
    state: State = {}
    tensor: Any
    for name, tensor in defaults.model_state(run).items():
        if not hasattr(tensor, "ds_tensor") or tensor.ds_tensor.status.name != "AVAILABLE":
            continue
        local = _local_partition(tensor)
        if local is not None:
            values, start = local
            state[name] = Piece(values, start, tuple(tensor.ds_shape))
    return state


@torch.no_grad()
def load(run: Run, saved: SavedState, progress: Progress) -> bool:
    """Load the model, its masters, the optimizer's state and DeepSpeed's schedule; always true."""
    for name, tensor in defaults.model_state(run).items():
        _write(tensor, name, saved)
    # Optimizers of DeepSpeed keep a step count as an int.
    is_of_deepspeed = type(run.optimizer).__module__.startswith("deepspeed.")
    flat_buffers.load(parts(run), run.optimizer, saved, int if is_of_deepspeed else None)
    scheduler = getattr(run.model, "lr_scheduler", None)
    if scheduler is not None:
        steps = _steps_taken(saved, progress)
        if steps:
            scheduler.step(steps - 1)  # DeepSpeed counts from -1
    return True


def parts(run: Run) -> Iterator[flat_buffers.Part]:
    """Yield this rank's parts of the trained parameters, in the same order on every rank."""
    optimizer = getattr(run.model, "optimizer", None)
    names = {parameter: name for name, parameter in run.module.named_parameters()}
    for masters, groups, locate in _master_weights(run, optimizer):
        for master, group in zip(masters, groups, strict=True):
            for parameter in group:
                offset, start, count = locate(parameter)
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                yield flat_buffers.Part(
                    names[parameter], master, offset, start, count, shape, whole=master is parameter
                )


def _steps_taken(saved: SavedState, progress: Progress) -> int:
    """Return the steps of the saved optimizer; those of the run if it does not count them."""
    ending = f"/{flat_buffers.STEP}"
    counts = [float(saved[name]) for name in saved if name.endswith(ending)]
    return int(max(counts, default=progress.step))


def _master_weights(
    run: Run, optimizer: Any
) -> Iterator[tuple[list[Tensor], list[list[nn.Parameter]], Locate]]:
    """Yield fp32 master tensors, the parameters in each, and a function that locates one in it."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        yield (
            optimizer.fp32_partitioned_groups_flat,
            optimizer.fp16_groups,
            lambda p: _partition_of(optimizer, p),
        )
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
        for master, group, flat, ranks in zip(
            optimizer.single_partition_of_fp32_groups,
            optimizer.bit16_groups,
            optimizer.bit16_groups_flat,
            optimizer.real_dp_process_group,
            strict=True,
        ):
            rank = torch.distributed.get_rank(ranks)
            yield [master], [group], partial(_fragment_in, flat, master.numel(), rank)
    elif hasattr(optimizer, "fp32_groups_flat_partition"):  # stage 1 in bf16
        yield optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, _fragment_of
    elif run.optimizer is not None:
        trained = [p for group in run.optimizer.param_groups for p in group["params"]]
        yield trained, [[p] for p in trained], lambda p: (0, 0, p.numel())


def _partition_of(optimizer: Any, parameter: Any) -> tuple[int, int, int]:
    """Locate a parameter at stage 3.

    Its partitions are equal, and the last ones may be partly or wholly padding.
    """
    _, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(size * parameter.ds_process_group.rank(), parameter.ds_numel)
    return offset, start, min(size, parameter.ds_numel - start)


def _fragment_in(
    flat: Tensor, partition: int, rank: int, parameter: Tensor
) -> tuple[int, int, int]:
    """Locate a parameter at stages 1 and 2, where a partition of ``flat`` may begin inside of it.

    ``flat`` is the buffer of the parameter's group, which has partitions of ``partition`` elements.
    The parameter is a view into ``flat``, so its address says where it is. DeepSpeed's own
    ``_hp_mapping`` takes the order of the group for the order in the buffer, which is another one
    with ``round_robin_gradients``.
    """
    partition_start = partition * rank
    parameter_start = int(parameter.storage_offset()) - int(flat.storage_offset())
    first = max(parameter_start, partition_start)
    stop = min(parameter_start + parameter.numel(), partition_start + partition)
    if first >= stop:  # the parameter is in other ranks' partitions
        return 0, 0, 0
    return first - partition_start, first - parameter_start, stop - first


def _fragment_of(parameter: Any) -> tuple[int, int, int]:
    """Locate a parameter at stage 1 in bf16, where a partition may begin inside of it."""
    mapping = parameter._hp_mapping
    if mapping is None:  # the parameter is in other ranks' partitions
        return 0, 0, 0
    return (
        mapping.hp_fragment_address.start,
        mapping.lp_fragment_address.start,
        mapping.hp_fragment_address.numel,
    )


def _frozen_entries(run: Run) -> Iterator[tuple[str, Tensor | Piece]]:
    """Yield buffers and frozen parameters as entries of the state."""
    trained = {f"model/{part.name}" for part in parts(run)}
    tensor: Any
    for name, tensor in defaults.model_state(run).items():
        if name in trained:
            continue
        if not hasattr(tensor, "ds_tensor"):
            yield name, tensor.detach()
            continue
        local = _local_partition(tensor)
        if local is not None:
            values, start = local
            yield name, Piece(values, start, tuple(tensor.ds_shape))


def _local_partition(parameter: Any) -> tuple[Tensor, int] | None:
    """Return this rank's partition of a parameter at stage 3, without padding, and its start.

    ``None``: the partition has no elements of the parameter.
    """
    partition = parameter.ds_tensor.detach().reshape(-1)
    start = partition.numel() * parameter.ds_process_group.rank()
    count = min(partition.numel(), parameter.ds_numel - start)
    if count <= 0:
        return None
    return partition.narrow(0, 0, count), start


def _write(tensor: Any, name: str, saved: SavedState) -> None:
    """Write the saved values of a parameter or buffer into the tensor that forward reads."""
    if not hasattr(tensor, "ds_tensor"):
        tensor.copy_(saved[name])
        return
    # With zero_hpz_partition_size the forward pass gathers from this second copy, which has the
    # values of before.
    tensor.ds_secondary_tensor = None
    local = _local_partition(tensor)
    if local is not None:
        values, start = local
        values.copy_(saved.piece(name, start, len(values)))
    if tensor.numel() == tensor.ds_numel:  # a small parameter stays gathered between steps
        tensor.data.copy_(saved[name])

"""The part of a DTensor that this rank holds, as a run of elements: what checkpoints and weight files deal in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distcore import Piece, Run, SavedState, State, defaults

Read = Callable[[int, int], Tensor]
"""``read(start, count)``: that run of a flattened tensor."""


def reshard(model: nn.Module) -> None:
    """Put the sharded parameters back where a forward pass without backward has left gathered ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def fill(target: Tensor, read: Read) -> None:
    """Copy into ``target`` the elements that this rank holds of it; nothing else is read."""
    local, start = _local(target)
    if local.numel():
        local.copy_(read(start, local.numel()).view_as(local))


def save_state(run: Run) -> State:
    """Everything this rank holds; of a shard that several replicas hold, the first one answers."""
    reshard(run.module)
    tensors = defaults.model_state(run) | defaults.optimizer_state(run)
    return {name: _held(tensor.detach()) for name, tensor in tensors.items() if _is_mine(tensor)}


def load_state(run: Run, state: SavedState) -> bool:
    """Read this rank's part of every tensor, whatever number of ranks and strategy saved it."""
    reshard(run.module)
    with torch.no_grad():
        for name, tensor in defaults.model_state(run).items():
            _load(tensor, name, state)
    if run.optimizer is not None:
        _load_optimizer(run.module, run.optimizer, state)
    return True


def _load_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, state: SavedState) -> None:
    names = {parameter: name for name, parameter in module.named_parameters()}
    saved: dict[str, list[str]] = {}
    for entry in state:
        if entry.startswith("optimizer/"):
            name, _, key = entry.removeprefix("optimizer/").rpartition("/")
            saved.setdefault(name, []).append(key)
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {
        index: {key: _optimizer_tensor(parameter, f"optimizer/{name}/{key}", state) for key in saved[name]}
        for index, parameter in enumerate(order)
        if (name := names[parameter]) in saved
    }
    optimizer.load_state_dict(optimizer.state_dict() | {"state": tensors})


def _optimizer_tensor(parameter: Tensor, name: str, state: SavedState) -> Tensor:
    """A count of steps as it is; a moment as a DTensor that is sharded as its parameter is."""
    if name.endswith("/step"):
        return state[name]
    moment = torch.zeros_like(parameter, requires_grad=False)
    _load(moment, name, state)
    return moment


def _load(target: Tensor, name: str, state: SavedState) -> None:
    if isinstance(target, DTensor):
        fill(target, lambda start, count: state.piece(name, start, count))
    else:
        target.copy_(state[name])


def _held(tensor: Tensor) -> Tensor | Piece:
    if not isinstance(tensor, DTensor):
        return tensor
    local, start = _local(tensor)
    return Piece(local.reshape(-1), start, tuple(tensor.shape))


def _is_mine(tensor: Tensor) -> bool:
    """False for an empty shard, and for the copies of a shard on all replicas but the first."""
    if not isinstance(tensor, DTensor):
        return True
    place: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    copies = [i for i, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()]
    return tensor.to_local().numel() > 0 and not any(copies)


def _local(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's shard and where its first element lies in the flattened whole: rows are never cut."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset[0] * prod(tensor.shape[1:])

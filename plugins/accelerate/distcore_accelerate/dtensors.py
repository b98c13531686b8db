"""Checkpoints of DTensors that are sharded by rows: the part that this rank holds, as a run of elements."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distcore import Piece, Run, SavedState, State, defaults


def save(run: Run) -> State:
    """Everything that this rank holds."""
    tensors = defaults.model_state(run) | defaults.optimizer_state(run)
    return {name: held for name, tensor in tensors.items() if (held := _held(tensor.detach())) is not None}


@torch.no_grad()
def load(run: Run, state: SavedState) -> bool:
    """Read this rank's part of every tensor."""
    for name, tensor in defaults.model_state(run).items():
        _fill(tensor, name, state)
    if run.optimizer is not None:
        _load_optimizer(run, run.optimizer, state)
    return True


def _load_optimizer(run: Run, optimizer: torch.optim.Optimizer, state: SavedState) -> None:
    names = {parameter: name for name, parameter in run.module.named_parameters()}
    keys: dict[str, list[str]] = {}
    for entry in state:
        if entry.startswith("optimizer/"):
            name, _, key = entry.removeprefix("optimizer/").rpartition("/")
            keys.setdefault(name, []).append(key)
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    parameters = {name: parameter for parameter, name in names.items()}
    tensors = {
        index: {key: _moment(parameters[name], f"optimizer/{name}/{key}", state) for key in keys[name]}
        for index, name in enumerate(order)
        if name in keys
    }
    optimizer.load_state_dict(optimizer.state_dict() | {"state": tensors})


def _moment(parameter: Tensor, name: str, state: SavedState) -> Tensor:
    """A count of steps as it is; a moment as a DTensor that is sharded as its parameter is."""
    if name.endswith("/step"):
        return state[name]
    moment = torch.zeros_like(parameter, requires_grad=False)
    _fill(moment, name, state)
    return moment


def _fill(target: Tensor, name: str, state: SavedState) -> None:
    if not isinstance(target, DTensor):
        target.copy_(state[name])
        return
    local, start = _local(target)
    if local.numel():
        local.copy_(state.piece(name, start, local.numel()).view_as(local))


def _held(tensor: Tensor) -> Tensor | Piece | None:
    if not isinstance(tensor, DTensor):
        return tensor
    local, start = _local(tensor)
    return Piece(local.reshape(-1), start, tuple(tensor.shape)) if local.numel() else None


def _local(tensor: DTensor) -> tuple[Tensor, int]:
    """This rank's shard and where its first element lies in the flattened whole: rows are never cut."""
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset[0] * prod(tensor.shape[1:]) if tensor.shape else 0

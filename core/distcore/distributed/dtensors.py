"""DTensors in checkpoints: a rank saves its shard of a tensor as consecutive elements
of the flattened whole.

For strategies that shard along the first dimension, so that rows stay whole. Plain tensors and
scalars are saved whole.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distcore.errors import ModelError
from distcore.plugin.strategy import defaults
from distcore.plugin.strategy.contract import Run, WeightStream
from distcore.plugin.strategy.state import Piece, SavedState, State

Read = Callable[[int, int], Tensor]
"""``read(start, count)`` returns ``count`` elements of a flattened tensor from index ``start``
on, in any shape.
"""


def save(run: Run) -> State:
    """Return this rank's part of model and optimizer state, by neutral name.

    A shard is a ``Piece`` in its own dtype, on its own device, marked on all replicas but the
    first. An empty shard is left out. Raises ValueError for a DTensor with another sharded
    dimension.
    """
    reshard(run.module)
    tensors = defaults.model_state(run) | defaults.optimizer_state(run)
    return {
        name: local_piece(tensor.detach())
        for name, tensor in tensors.items()
        if not is_empty(tensor)
    }


@torch.no_grad()
def load(run: Run, state: SavedState) -> bool:
    """Read this rank's part of every tensor, whatever strategy and number of ranks
    saved it; always true.

    Moments of the optimizer become DTensors that are sharded as their parameters are. Raises
    CheckpointError for a plain tensor of another shape than the model's.
    """
    reshard(run.module)
    for name, tensor in defaults.model_state(run).items():
        _load(tensor, name, state)
    if run.optimizer is not None:
        defaults.load_optimizer(run, state, _optimizer_tensor)
    return True


class GradientSync:
    """Tells sharded units whether the next backward pass is the last of its step, after
    which they send gradients.

    A unit that no forward pass has used yet is always told to send: it has nothing to send, and
    torch fails at the end of a backward pass on an unused unit that keeps gradients in another
    dtype than the weights'.
    """

    def __init__(self, model: Any) -> None:
        """``model``, a module, and its units are wrapped already; no forward pass has run yet."""
        self.model = model
        self._last = True
        self._hooks_of_unused: dict[nn.Module, Any] = {
            module: module.register_forward_pre_hook(self._begin_to_use)
            for module in model.modules()
            if hasattr(module, "set_requires_gradient_sync")
        }

    def tell(self, last: bool) -> None:
        """Tell all units. Before the ``last`` backward pass of a step they keep gradients,
        after it they send them.
        """
        self._last = last
        self.model.set_requires_gradient_sync(last)
        unit: Any
        for unit in self._hooks_of_unused:
            unit.set_requires_gradient_sync(True, recurse=False)

    def _begin_to_use(self, unit: Any, _inputs: object) -> None:
        self._hooks_of_unused.pop(unit).remove()
        unit.set_requires_gradient_sync(self._last, recurse=False)


def sharded_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the sharded units of ``model`` by name: at each call of one its weights are
    gathered. The model itself, if it is sharded, has no name.
    """
    return {
        name: unit
        for name, unit in model.named_modules()
        if hasattr(unit, "set_gradient_divide_factor")
    }


def sum_gradients(model: nn.Module) -> None:
    """Have the sharded units of ``model`` add gradients over ranks, and not divide the sum.

    A division by a number of ranks that is no power of two rounds every gradient once more.
    """
    unit: Any
    for unit in sharded_units(model).values():
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # not a multiplication by 1 on the way


@torch.no_grad()
def make_contiguous(model: nn.Module) -> None:
    """Give each parameter of ``model`` consecutive memory, as layers in ``channels_last``
    lack: nothing else shards.
    """
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def refuse_mixed_dtypes(model: nn.Module) -> None:
    """Raise ModelError for a unit, sharded by torch, with trained parameters of two dtypes: it
    gathers them as one.
    """
    of_unit: dict[int, tuple[nn.Module, str, nn.Parameter]] = {}
    for path, unit in model.named_modules():  # inner units come later
        if hasattr(unit, "set_gradient_divide_factor"):
            prefix = f"{path}." if path else ""
            of_unit |= {
                id(one): (unit, prefix + name, one) for name, one in unit.named_parameters()
            }
    first: dict[nn.Module, tuple[str, nn.Parameter]] = {}
    for unit, name, parameter in of_unit.values():
        if not parameter.requires_grad:
            continue
        other, one = first.setdefault(unit, (name, parameter))
        if one.dtype != parameter.dtype:
            raise ModelError(
                f"parameters {other!r} ({one.dtype}) and {name!r} ({parameter.dtype}) are sharded"
                " together, which torch does for one dtype alone: give them the same, or have"
                " their layers be units of their own (strategy_options.wrap)"
            )


def reshard(model: nn.Module) -> None:
    """Free the parameters that a forward pass without backward has left gathered.

    The model then has its shards again. torch's wrappers have a method of that name.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "unshard") and hasattr(module, "reshard"):
            module.reshard()


@torch.no_grad()
def fill(target: Tensor, read: Read) -> None:
    """Copy into ``target`` the elements that this rank holds of it; ``read`` is not
    asked for any others.
    """
    local, start = local_part(target)
    if local.numel():
        local.copy_(read(start, local.numel()).view_as(local))


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the parameters of ``model``, which are on the meta device, memory on
    ``device``, but no values.

    Buffers that have values keep them, and are moved there. Parameters stay the same objects,
    and so stay tied.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    moved = {id(buffer): buffer.to(device) for buffer in buffers.values() if not buffer.is_meta}
    for name, buffer in buffers.items():
        if not buffer.is_meta:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, moved[id(buffer)])


@torch.no_grad()
def replay(model: nn.Module, values: WeightStream) -> None:
    """Fill this rank's part of the parameters of ``model``, a whole model,
    from the stream ``values``.
    """
    held = {name: local_part(parameter) for name, parameter in model.named_parameters()}

    def wanted(name: str) -> tuple[int, int]:
        local, start = held[name]
        return start, local.numel()

    for name, drawn in values(wanted):
        held[name][0].copy_(drawn.view_as(held[name][0]))
        del drawn  # before the next one is drawn


def _load(target: Tensor, name: str, state: SavedState) -> None:
    if isinstance(target, DTensor):
        fill(target, lambda start, count: state.piece(name, start, count))
    else:
        defaults.load_whole(target, name, state)


def _optimizer_tensor(parameter: Tensor, name: str, state: SavedState) -> Tensor:
    if name.endswith("/step") or state.shape(name) != tuple(parameter.shape):
        return state[name]
    moment = torch.zeros_like(parameter, requires_grad=False)
    _load(moment, name, state)
    return moment


def local_piece(tensor: Tensor) -> Tensor | Piece:
    """Return a plain tensor unchanged; for a DTensor, this rank's piece."""
    if not isinstance(tensor, DTensor):
        return tensor
    local, start = local_part(tensor)
    return Piece(local.reshape(-1), start, tuple(tensor.shape), replica=is_replica(tensor))


def is_replica(tensor: Tensor) -> bool:
    """Return True if an earlier rank holds the same part of a DTensor; False for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return False
    place = tensor.device_mesh.get_coordinate() or ()
    return any(
        at
        for at, placement in zip(place, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def is_empty(tensor: Tensor) -> bool:
    """Return True for a DTensor with an empty shard on this rank."""
    return isinstance(tensor, DTensor) and tensor.to_local().numel() == 0


def local_part(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's shard of a DTensor, and the index of its first
    element in the flattened whole.

    A plain tensor is its own shard, from 0 on. Raises ValueError as ``save`` does.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 0
    if any(placement.is_shard() and not placement.is_shard(0) for placement in tensor.placements):
        raise ValueError(
            f"a DTensor with placements {tensor.placements}: only the first dimension may be"
            " sharded"
        )
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), offset[0] * prod(tensor.shape[1:]) if tensor.shape else 0

"""DTensors in checkpoints: a rank saves its shard as consecutive elements of the flattened whole.

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
"""``read(start, count)`` returns elements of a flattened tensor from ``start`` on, in any shape."""


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
    """Read this rank's part of every tensor, whoever saved it; always true.

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
    """Lets sharded units send gradients after the last backward pass of a step only.

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
        """Before the ``last`` backward pass of a step units keep gradients, after it they send."""
        self._last = last
        self.model.set_requires_gradient_sync(last)
        unit: Any
        for unit in self._hooks_of_unused:
            unit.set_requires_gradient_sync(True, recurse=False)

    def _begin_to_use(self, unit: Any, _inputs: object) -> None:
        """Treat a unit as the others from its first forward pass on."""
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


def gathered_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters that backward passes compute the gradients of.

    The sharded units of ``model`` gather them, into the same objects each time. Every rank calls.
    """
    gathered = []
    unit: Any
    for unit in sharded_units(model).values():
        unit.unshard()
        for parameter in unit.parameters():
            # Of the units inside of it there are shards.
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                gathered.append(parameter)
        unit.reshard()
    return gathered


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
    """Give each parameter consecutive memory, without which torch does not shard it.

    Layers in ``channels_last`` lack it.
    """
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def refuse_mixed_dtypes(model: nn.Module) -> None:
    """Raise ModelError for a sharded unit with trained parameters of two dtypes.

    torch gathers the parameters of a unit as one tensor.
    """
    unit_of: dict[int, tuple[nn.Module, str, nn.Parameter]] = {}
    for path, unit in model.named_modules():  # inner units come later, and have the last word
        if hasattr(unit, "set_gradient_divide_factor"):
            prefix = f"{path}." if path else ""
            for name, parameter in unit.named_parameters():
                unit_of[id(parameter)] = (unit, prefix + name, parameter)
    first_of: dict[nn.Module, tuple[str, nn.Parameter]] = {}
    for unit, name, parameter in unit_of.values():
        if not parameter.requires_grad:
            continue
        first_name, first = first_of.setdefault(unit, (name, parameter))
        if first.dtype != parameter.dtype:
            both = f"{first_name!r} ({first.dtype}) and {name!r} ({parameter.dtype})"
            raise ModelError(
                f"parameters {both} are sharded together, which torch does for one dtype alone:"
                " give them the same, or have their layers be units of their own"
                " (strategy_options.wrap)"
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
    """Copy into ``target`` the elements that this rank holds of it; ``read`` returns just these."""
    local, start = local_part(target)
    if local.numel():
        local.copy_(read(start, local.numel()).view_as(local))


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give parameters of ``model`` on the meta device memory on ``device``, but no values.

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
    # A buffer that several modules share stays one.
    moved: dict[int, Tensor] = {}
    for name, buffer in buffers.items():
        if buffer.is_meta:
            continue
        if id(buffer) not in moved:
            moved[id(buffer)] = buffer.to(device)
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, moved[id(buffer)])


@torch.no_grad()
def replay(model: nn.Module, values: WeightStream) -> None:
    """Fill this rank's part of the parameters of ``model``, a whole model, from ``values``."""
    parts = {name: local_part(parameter) for name, parameter in model.named_parameters()}

    def wanted(name: str) -> tuple[int, int]:
        local, start = parts[name]
        return start, local.numel()

    for name, drawn in values(wanted):
        local, _ = parts[name]
        local.copy_(drawn.view_as(local))
        del drawn  # before the next one is drawn


def _load(target: Tensor, name: str, state: SavedState) -> None:
    if isinstance(target, DTensor):
        fill(target, lambda start, count: state.piece(name, start, count))
    else:
        defaults.load_whole(target, name, state)


def _optimizer_tensor(parameter: Tensor, name: str, state: SavedState) -> Tensor:
    """Return a tensor of the optimizer's state: sharded as its parameter, if it has its shape."""
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
    position = tensor.device_mesh.get_coordinate() or ()
    return any(
        index > 0 and placement.is_replicate()
        for index, placement in zip(position, tensor.placements, strict=True)
    )


def is_empty(tensor: Tensor) -> bool:
    """Return True for a DTensor with an empty shard on this rank."""
    return isinstance(tensor, DTensor) and tensor.to_local().numel() == 0


def local_part(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's shard of a DTensor, and where it begins in the flattened whole.

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
    if not tensor.shape:
        return tensor.to_local(), 0
    elements_of_row = prod(tensor.shape[1:])
    return tensor.to_local(), offset[0] * elements_of_row

"""Memory of ranks in bytes, from a model on the meta device, for strategies that plan it.

No tensor here has values: parameters are resized as the strategy shards them, and
the optimizer steps them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distcore.plugin.optimizer import HasSavedState
from distcore.plugin.strategy.contract import OptimizerFactory
from distcore.plugin.strategy.memory import Memory

Shape = Sequence[int]


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors of any device; an object that comes again counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def resized(meta_model: nn.Module, shape_of: Callable[[str, nn.Parameter], Shape]) -> nn.Module:
    """Return a copy of ``meta_model`` whose parameters have their shapes on a rank."""
    module = copy.deepcopy(meta_model).to("meta")  # an adapter has its values in a meta model, too
    for name, parameter in module.named_parameters():
        shape = tuple(shape_of(name, parameter))
        parameter.data = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return module


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of ``optimizer`` after its first step; its parameters are meta tensors."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    with _Valueless():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    return nbytes(value for value in values if isinstance(value, Tensor))


def saved_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of ``optimizer`` in a checkpoint; its parameters are meta tensors."""
    in_memory = optimizer_bytes(optimizer)
    if not isinstance(optimizer, HasSavedState):
        return in_memory
    saved: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            saved += optimizer.saved_state(parameter).values()
    return nbytes(saved)


def whole(meta_model: nn.Module, make_optimizer: OptimizerFactory) -> Memory:
    """Return the memory of a rank with an unsharded model."""
    return Memory(
        parameters=nbytes(meta_model.parameters()),
        gradients=nbytes(trained(meta_model)),
        optimizer=optimizer_bytes(make_optimizer(copy.deepcopy(meta_model))),
    )


def shared(size: int, ranks: int, times: int = 1) -> int:
    """Return the bytes that each rank of a ring sends for ``size`` bytes, ``times`` times.

    Once for an all-gather or a reduce-scatter, twice for an all-reduce.
    """
    return times * size * (ranks - 1) // ranks


class _Valueless(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Returns 1 for the value of a tensor that has none, such as the norm of a weight."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))

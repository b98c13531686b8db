"""Carry a model's own hooks on gradients over to the parameters that ``fully_shard`` makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def carry_gradient_hooks(model: nn.Module, hooks: Mapping[str, list[Callable[[Any], Any]]]) -> None:
    """Register ``hooks``, by parameter name, on the whole parameters, which backward passes see.

    torch makes them at the first gathering and keeps them. A hook then takes the whole gradient of
    a micro-batch, as in one process.
    """
    if not hooks:
        return
    # On the shards, too, which no backward pass reaches: it shows the core that nothing was lost.
    _register(model, hooks)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    _register(model, hooks)
    for module in sharded:
        module.reshard()


def _register(model: nn.Module, hooks: Mapping[str, list[Callable[[Any], Any]]]) -> None:
    """Register ``hooks`` on the model's present parameters."""
    parameters = dict(model.named_parameters())
    for name, functions in hooks.items():
        for function in functions:
            # torch leaves it untyped
            parameters[name].register_hook(function)  # type: ignore[no-untyped-call]

"""Hooks that a module has on the gradients of its parameters, such as a mask for pruning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from distcore.errors import ModelError


def gradient_hooks(module: nn.Module) -> dict[str, list[Callable[[Any], Any]]]:
    """Return the functions that ``register_hook`` gave to each parameter, by name, in order."""
    hooks: dict[str, list[Callable[[Any], Any]]] = {}
    for name, parameter in module.named_parameters():
        hooked: Any = parameter
        if hooked._backward_hooks:
            hooks[name] = list(hooked._backward_hooks.values())
    return hooks


def hooked_parameters(module: nn.Module) -> set[str]:
    """Return the names of parameters with a hook: on the gradient, or on what has accumulated."""
    after: set[str] = set()
    for name, parameter in module.named_parameters():
        hooked: Any = parameter
        if hooked._post_accumulate_grad_hooks:
            after.add(name)
    return after | gradient_hooks(module).keys()


def refuse_lost_hooks(strategy: str, module: nn.Module, hooked: set[str]) -> None:
    """Raise ModelError if a parameter of ``hooked`` has lost its hook: it may be a new object."""
    if lost := sorted(hooked - hooked_parameters(module)):
        raise ModelError(
            f"strategy {strategy!r} replaces the parameters of a model, and the hook on the"
            f" gradient of {lost[0]!r} is lost; take a strategy that keeps it, such as --strategy"
            " single"
        )

"""A user's optimizer in a config: a class like torch's, or a function that returns an optimizer."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from distcore.errors import ConfigError
from distcore.plugin.optimizer import BuildsOptimizer, ParameterGroup


def as_plugin(name: str, target: Any) -> type[BuildsOptimizer]:
    """Return ``target`` if it is an optimizer plugin, else a plugin class that calls ``target``.

    The call is ``target(groups, lr=…, NAME=…)``; its other parameters are the options. It is elementwise if its
    attribute ``elementwise`` is true; default: False. Raises ConfigError if it takes no ``lr``.
    """
    if dataclasses.is_dataclass(target) and hasattr(target, "build"):
        if not hasattr(target, "elementwise"):
            raise ConfigError(f"optimizer.name = {name!r}: does not say whether it is elementwise, True or False")
        return cast("type[BuildsOptimizer]", target)
    try:
        _, *parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # no callable, or one without parameters
        parameters = []
    taken = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if taken.pop("lr", None) is None:
        raise ConfigError(f"optimizer.name = {name!r}: takes no lr; expected (params, lr, …), as of torch's optimizers")
    fields = [(option, Any, _field(parameter)) for option, parameter in taken.items()]
    namespace = {
        "elementwise": getattr(target, "elementwise", False),
        "build": lambda self, module, groups: _called(name, target, groups, dict(vars(self))),
        "__doc__": inspect.getdoc(target),
    }
    made = dataclasses.make_dataclass("Own", fields, namespace=namespace, frozen=True, kw_only=True)
    made.__module__ = getattr(target, "__module__", "")  # else ours, from Python 3.12 on
    return cast("type[BuildsOptimizer]", made)


def check(name: str, plugin: BuildsOptimizer) -> None:
    """Take two steps on a small model; raises ConfigError for state that no checkpoint would hold."""
    with torch.random.fork_rng(devices=()):
        module = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))
    decay = {"weight_decay": 0.0} if hasattr(plugin, "weight_decay") else {}
    optimizer = plugin.build(module, [{"params": list(module.parameters()), "lr": 1e-3, **decay}])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer.name = {name!r}: gave a {type(optimizer).__name__}, no torch.optim.Optimizer")
    before = _settings(optimizer)
    try:
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
    except Exception as error:  # the user's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"optimizer.name = {name!r}: its first steps, on a small model, failed: {reason}") from error
    kept = [
        (key, value, parameter.shape)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    ]
    lost = [f"state[parameter][{key!r}]" for key, value, _ in kept if not isinstance(value, torch.Tensor)]
    lost += [] if _settings(optimizer) == before else ["its param_groups"]
    if lost:
        raise ConfigError(
            f"optimizer.name = {name!r}: keeps a value in {lost[0]} that is no tensor of a parameter's state, so a "
            "checkpoint would lose it; keep torch.tensor(value) in state[parameter]"
        )
    odd = [key for key, value, shape in kept if value.shape not in (torch.Size(), shape)]
    if plugin.elementwise and odd:
        raise ConfigError(
            f"optimizer.name = {name!r}: declares elementwise = True, but state[parameter][{odd[0]!r}] has another "
            "shape than the parameter, and is no single number"
        )


def _field(parameter: inspect.Parameter) -> Any:
    required = parameter.default is inspect.Parameter.empty
    return dataclasses.field() if required else dataclasses.field(default_factory=lambda: parameter.default)


def _called(name: str, target: Callable[..., Any], groups: list[ParameterGroup], options: dict[str, Any]) -> Any:
    try:
        return target(groups, lr=groups[0]["lr"], **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.name = {name!r}: {' '.join(str(error).split())}") from error


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

"""A user's optimizer in a config: a class like torch's, or a function that returns an optimizer."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from distcore.errors import ConfigError
from distcore.model.dropout import CountsDraws
from distcore.model.row_dropout import other_generators
from distcore.plugin.optimizer import BuildsOptimizer, ParameterGroup

OF_TORCH = frozenset({"state", "param_groups", "defaults"})
"""Attributes of each torch optimizer, of which a checkpoint has what it needs."""


def as_plugin(name: str, target: Any) -> type[BuildsOptimizer]:
    """Return ``target`` if it is an optimizer plugin, else a plugin class that calls ``target``.

    The call is ``target(groups, lr=…, NAME=…)``; its other parameters are the options. It is
    elementwise if its attribute ``elementwise`` is true; default: False. Raises ConfigError if it
    takes no ``lr``.
    """
    if dataclasses.is_dataclass(target) and hasattr(target, "build"):
        if not hasattr(target, "elementwise"):
            raise ConfigError(
                f"optimizer.name = {name!r}: does not say whether it is elementwise, True or False"
            )
        return cast("type[BuildsOptimizer]", target)
    try:
        _, *parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # no callable, or one without parameters
        parameters = []
    taken = {}
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            taken[parameter.name] = parameter
    if taken.pop("lr", None) is None:
        raise ConfigError(
            f"optimizer.name = {name!r}: takes no lr; expected (params, lr, …), as of torch's"
            " optimizers"
        )
    fields = [(option, Any, _field(parameter)) for option, parameter in taken.items()]

    def build(self: Any, module: nn.Module, groups: list[ParameterGroup]) -> Any:
        return _called(name, target, groups, dict(vars(self)))

    namespace = {
        "elementwise": getattr(target, "elementwise", False),
        "build": build,
        "__doc__": inspect.getdoc(target),
    }
    made = dataclasses.make_dataclass("Own", fields, namespace=namespace, frozen=True, kw_only=True)
    made.__module__ = getattr(target, "__module__", "")  # else ours, from Python 3.12 on
    return cast("type[BuildsOptimizer]", made)


STEPS = 12
"""Steps of the check: it shows also what an optimizer does every tenth step, or after a warm-up.
"""


def check(name: str, plugin: BuildsOptimizer, ranks: int = 1) -> None:
    """Take some steps on a small model; raises ConfigError for state that no checkpoint would hold.

    An optimizer that draws random numbers is refused on several ``ranks``, which would draw other
    ones.
    """
    with torch.random.fork_rng(devices=()):
        module = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    group: ParameterGroup = {"params": list(module.parameters()), "lr": 1e-3}
    if hasattr(plugin, "weight_decay"):
        group["weight_decay"] = 0.0
    optimizer = plugin.build(module, [group])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer.name = {name!r}: gave a {type(optimizer).__name__}, no"
            " torch.optim.Optimizer"
        )
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer.name = {name!r}: its param_groups have no 'lr', which the schedule sets and"
            " checkpoints have; read the learning rate from group['lr'] in step()"
        )
    settings_before = _settings(optimizer)
    attributes_before = _attributes(optimizer, module)
    generators = other_generators()
    try:
        with CountsDraws() as drawn:  # type: ignore[no-untyped-call]
            for _ in range(STEPS):
                for parameter in module.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5)
                optimizer.step()
    except Exception as error:  # the user's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"optimizer.name = {name!r}: its first steps, on a small model, failed: {reason}"
        ) from error
    if ranks > 1 and (drawn.count or generators != other_generators()):
        raise ConfigError(
            f"optimizer.name = {name!r}: draws random numbers in its step, which would be others on"
            f" each of {ranks} ranks: use --nproc 1, or compute the numbers from step and element"
        )
    odd_keys = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if odd_keys:
        raise ConfigError(
            f"optimizer.name = {name!r}: keeps state under the key {odd_keys[0]!r}, which is no"
            " parameter, so a checkpoint would lose it; keep it in state[parameter]"
        )
    states = [
        (key, value, parameter.shape)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    ]
    lost = []
    for key, value, _ in states:
        if not isinstance(value, torch.Tensor):
            lost.append(f"state[parameter][{key!r}]")
    if _settings(optimizer) != settings_before:
        lost.append("its param_groups")
    for owner, value in sorted(_attributes(optimizer, module).items()):
        if value != attributes_before.get(owner):
            lost.append(owner)
    if lost:
        raise ConfigError(
            f"optimizer.name = {name!r}: keeps a value in {lost[0]} that is no tensor of a"
            " parameter's state, so a checkpoint would lose it; keep torch.tensor(value) in"
            " state[parameter]"
        )
    scalar = torch.Size()
    odd = [key for key, value, shape in states if value.shape not in (scalar, shape)]
    if plugin.elementwise and odd:
        raise ConfigError(
            f"optimizer.name = {name!r}: declares elementwise = True, but"
            f" state[parameter][{odd[0]!r}] has another shape than the parameter, and is no single"
            " number"
        )


def _field(parameter: inspect.Parameter) -> Any:
    """Return the dataclass field of a parameter, with its default, if any."""
    if parameter.default is inspect.Parameter.empty:
        return dataclasses.field()
    return dataclasses.field(default_factory=lambda: parameter.default)


def _called(
    name: str, target: Callable[..., Any], groups: list[ParameterGroup], options: dict[str, Any]
) -> Any:
    """Call the user's class or function; raises ConfigError for options that it refuses."""
    try:
        return target(groups, lr=groups[0]["lr"], **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.name = {name!r}: {' '.join(str(error).split())}") from error


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group, without its parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _attributes(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, object]:
    """Return the values of attributes of the optimizer and its parameters, by their names."""
    values: dict[str, object] = {}
    for key, value in vars(optimizer).items():
        if key not in OF_TORCH and not key.startswith("_optimizer_"):
            values[f"its attribute {key!r}"] = _comparable(value)
    for parameter in module.parameters():
        for key, value in vars(parameter).items():
            values[f"the attribute {key!r} of a parameter"] = _comparable(value)
    return values


def _comparable(value: object) -> object:
    """Return the content of ``value``: a copy that a step does not change."""
    if isinstance(value, nn.Parameter):  # a step moves it, and the model has it
        return id(value)
    if isinstance(value, torch.Tensor):
        elements = value.detach().reshape(-1).tolist()
        return str(value.dtype), tuple(value.shape), elements
    if isinstance(value, Mapping):
        return [(id(key), _comparable(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_comparable(inner) for inner in value]
    if isinstance(value, int | float | str | bytes | None):
        return value
    return id(value)

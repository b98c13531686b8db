"""Choose FSDP units: modules whose parameters are gathered for their forward pass, then freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from distcore import StrategyError
from distcore.model import repeated_classes

Wrap = Annotated[int, Field(ge=1)] | str | tuple[str, ...]
"""``auto``, names of classes or modules (``encoder.layer.*``), or a unit's least parameters."""
Recomputed = bool | Annotated[int, Field(ge=2)] | Literal["products"]
"""Activations that are recomputed: none, of all units, of every n-th, or all but products."""
RECOMPUTED_TWICE = (
    "strategy_options.activation_checkpointing: has no effect with gradient_checkpointing = true,"
    " which recomputes all layers; leave out one of them"
)
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward pass. As units, their parameters would never be gathered."""


def find_units(model: nn.Module, wrap: Wrap) -> dict[str, nn.Module]:
    """Return the modules inside ``model`` to shard as units, by name, children before parents.

    A unit must own its parameters. A module that shares one with another part of the model is
    therefore left to the root. Raises StrategyError for a name that fits no module, or a parameter
    without dimensions.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise StrategyError(
                f"parameter {name!r} has no dimension that could be sharded: give it the shape (1,)"
            )
    if isinstance(wrap, int):
        chosen = set(_by_size(model, wrap))
    else:
        names: str | Iterable[str] = repeated_classes(model) if wrap == "auto" else wrap
        chosen = set(_by_name(model, names))
    units: dict[str, nn.Module] = {}
    # Reversed, because fully_shard() must see children before their parents.
    for name, module in reversed(list(model.named_modules())):
        is_chosen = module in chosen and module is not model
        if is_chosen and not _shares_parameters(model, module):
            units[name] = module
    return units


def describe_units(model: nn.Module, units: dict[str, nn.Module]) -> str:
    """Return a line for the log: the units' classes, and the number of the root's parameters."""
    kinds = Counter(type(module).__name__ for module in units.values())
    in_units: set[int] = set()
    for module in units.values():
        in_units.update(map(id, module.parameters()))
    of_root = [parameter for parameter in model.parameters() if id(parameter) not in in_units]
    size_of_root = sum(parameter.numel() for parameter in of_root)
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    if not listed:
        return f"sharded as one unit: the whole model, {size_of_root:,} parameters"
    return f"sharded as units: {listed}; with the root: {size_of_root:,} parameters"


def checkpoint_activations(units: Iterable[nn.Module], which: Recomputed) -> None:
    """Recompute activations in the backward pass: of each unit, every ``which``-th, or in part.

    "products" recomputes all but the results of products.

    Replaces ``forward`` instead of wrapping modules, so that parameter names do not change. A
    decoder of transformers caches keys and values by default. The second forward pass would append
    them again, so a unit gets no cache in training.
    """
    every = 1 if isinstance(which, bool | str) else which
    keeps: Callable[..., Any] = noop_context_fn
    if which == "products":
        keeps = partial(create_selective_checkpoint_contexts, _keep_products)
    for unit in list(units)[::every]:
        unit.forward = partial(_checkpoint_forward, unit.forward, keeps)


def _checkpoint_forward(
    forward: Callable[..., Any], keeps: Callable[..., Any], *inputs: Any, **named: Any
) -> Any:
    """Call ``forward``, and recompute its activations but those that ``keeps`` selects."""
    # In training a unit gets no cache: the second forward pass would append keys and values again.
    if torch.is_grad_enabled():
        inputs = tuple(None if _is_cache(value) else value for value in inputs)
        named = {name: None if _is_cache(value) else value for name, value in named.items()}
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=keeps, **named)


def _keep_products(
    _context: object, operation: object, *_inputs: object, **_named: object
) -> CheckpointPolicy:
    """Keep results of matrix products and attention: most of the time, part of the memory."""
    name = getattr(operation, "_opname", "")
    keeps = name in PRODUCTS or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _is_cache(value: object) -> bool:
    """Return True for a cache of keys and values by transformers."""
    return hasattr(value, "get_seq_length")


def _by_name(model: nn.Module, wrap: str | Iterable[str]) -> Iterator[nn.Module]:
    """Yield the modules whose class or name ``wrap`` has; raises StrategyError for other names."""
    names = [wrap] if isinstance(wrap, str) else wrap
    for name in names:
        named = [module for path, module in model.named_modules() if _is_named(name, path, module)]
        if not named:
            names_of_classes = {type(module).__name__ for module in model.modules()}
            classes = ", ".join(sorted(names_of_classes))
            problem = (
                f"no module of the model has that class ({classes}) or name; those of a list are"
                " LIST.*"
            )
            raise StrategyError(f"strategy 'fsdp': wrap = {name!r}: {problem}")
        yield from named


def _is_named(name: str, path: str, module: nn.Module) -> bool:
    """Return True if ``name`` is the class or the path of ``module``.

    A ``*`` in it matches one part of the path.
    """
    if type(module).__name__ == name:
        return True
    # fnmatch's * would also match several parts.
    has_same_depth = path.count(".") == name.count(".")
    return has_same_depth and fnmatchcase(path, name) and not isinstance(module, CONTAINERS)


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return every module with ``least`` parameters or more, not counting those of inner units."""
    chosen: list[nn.Module] = []

    def parameters_left(module: nn.Module) -> int:
        size = sum(p.numel() for p in module.parameters(recurse=False))
        left = size + sum(parameters_left(child) for child in module.children())
        if left >= least and not isinstance(module, CONTAINERS):
            chosen.append(module)
            return 0
        return left

    parameters_left(model)
    return chosen


def _shares_parameters(model: nn.Module, unit: nn.Module) -> bool:
    """Return True if a module outside ``unit`` has one of its parameters, too."""
    inside = set(unit.modules())
    of_unit = {id(p) for p in unit.parameters()}
    outside = (module for module in model.modules() if module not in inside)
    return any(id(p) in of_unit for module in outside for p in module.parameters(recurse=False))

"""The modules of stacked experts in a model, and their split over ranks.

A parameter of such a module holds the matrices of all experts, one after another, as in
transformers from version 5 on. So every family of models is split alike: along the first
dimension.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from distcore import StrategyError
from distcore_mesh.tensor_layout import TensorSplit

MARKS = ("_is_expert_parallel", "stacked_experts")
"""The attribute that marks a module of experts: of transformers, or of a module of one's own."""

WRAPPED = {"base_layer", "original_module", "modules_to_save"}
"""Names of a module inside of an adapter."""


def is_experts(module: nn.Module) -> bool:
    """Return True for stacked experts.

    Their forward takes hidden states ``(tokens, size)``, the experts that were chosen for each
    token and their weights, both ``(tokens, k)``, and returns the weighted sums.
    """
    return any(hasattr(module, mark) for mark in MARKS)


def find_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules of stacked experts by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def check_experts(model: nn.Module, key: str, ranks: int) -> None:
    """Raise StrategyError, one line, unless ``ranks`` ranks can share the experts of ``model``.

    ``model`` may be on the meta device; ``key`` is the option, with its value, to name.
    """
    experts = find_experts(model)
    if not experts:
        kind = type(model).__name__
        raise StrategyError(
            f"strategy_options.{key}: {kind} has no stacked experts to share; leave it out"
        )
    for name, module in experts.items():
        if WRAPPED & set(name.split(".")):
            raise StrategyError(
                f"lora.targets: {name} has an adapter, but strategy 'mesh' with {key} shares"
                " experts without one: name other layers, such as lora.targets='.*[qkvo]_proj', or"
                " split them by shard alone"
            )
        count = int(module.num_experts)
        for parameter_name, parameter in module.named_parameters():
            if parameter.shape[:1] != (count,):
                raise StrategyError(
                    f"strategy_options.{key}: {name}.{parameter_name} has the shape"
                    f" {tuple(parameter.shape)}, which does not begin with the {count} experts;"
                    " share layers by shard in place of it"
                )
        if count % ranks:
            divisors = [str(size) for size in range(1, count + 1) if count % size == 0]
            raise StrategyError(
                f"strategy_options.{key}: {ranks} ranks must divide the {count} experts of {name}"
                f" (possible: {', '.join(divisors)})"
            )


def splits_of_experts(model: nn.Module) -> dict[str, TensorSplit]:
    """Return the split of each parameter of experts, by name in ``model``."""
    splits: dict[str, TensorSplit] = {}
    for path, module in find_experts(model).items():
        for name, parameter in module.named_parameters():
            splits[f"{path}.{name}"] = TensorSplit(0, 1, tuple(parameter.shape))
    return splits

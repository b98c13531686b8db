"""The repeated blocks of a model, such as the layers of a transformer: what is sharded, or compiled, as one."""

from __future__ import annotations

from collections import Counter

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward."""


def repeated_classes(model: nn.Module) -> frozenset[str]:
    """Return the class names of a model's blocks: its ``_no_split_modules``, else its largest repeated class.

    Among repeated classes, one with child modules comes first: the embeddings of a small model can be larger than its
    blocks.
    """
    stated = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    present = frozenset(stated & {type(module).__name__ for module in model.modules()})
    if present:
        return present
    modules = [module for module in model.modules() if _size(module) and not isinstance(module, CONTAINERS)]
    counts = Counter(type(module) for module in modules)
    repeated = [module for module in modules if counts[type(module)] > 1]
    largest = max(repeated, key=lambda module: (any(module.children()), _size(module)), default=None)
    return frozenset() if largest is None else frozenset({type(largest).__name__})


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks inside ``model``, in its order; of blocks inside each other the outer ones."""
    classes, inside, found = repeated_classes(model), set[nn.Module](), []
    for module in model.modules():
        if type(module).__name__ in classes and module is not model and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())

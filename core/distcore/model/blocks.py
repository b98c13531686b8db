"""The repeated blocks of a model, such as the layers of a transformer: the one definition for all who ask.

They are what is sharded or compiled as one, what a pipeline is cut between, and what layer decay counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward."""


def repeated_classes(model: nn.Module) -> frozenset[str]:
    """Return the class names of a model's blocks, and of what else it says must not be split, such as its embeddings.

    They are those that its ``_no_split_modules`` name. Failing that, the classes of numbered children; failing that,
    the largest class that occurs more than once, such as the layers of a plain ``nn.Sequential``.
    """
    stated = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    if present := frozenset(stated & {type(module).__name__ for module in model.modules()}):
        return present
    if numbered := [path for stack in _numbered(model) for path in stack]:
        return frozenset(type(model.get_submodule(path)).__name__ for path in numbered)
    modules = [module for module in model.modules() if _size(module) and not isinstance(module, CONTAINERS)]
    counts = Counter(type(module) for module in modules)
    repeated = [module for module in modules if counts[type(module)] > 1]
    # One with modules inside comes first: the embeddings of a small model can be larger than its blocks.
    largest = max(repeated, key=lambda module: (any(module.children()), _size(module)), default=None)
    return frozenset() if largest is None else frozenset({type(largest).__name__})


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's blocks by path, in its order: the modules of ``repeated_classes`` that stand in lists.

    So embeddings, which some models name beside their blocks, are none; and one block alone in a list is one.
    """
    classes = repeated_classes(model)
    return {
        f"{path}.{name}".lstrip("."): child
        for path, container in model.named_modules()
        if isinstance(container, nn.ModuleList | nn.Sequential)
        for name, child in container.named_children()
        if type(child).__name__ in classes
    }


def stacks_of(model: nn.Module) -> list[list[str]]:
    """Return the paths of the model's stacked blocks, one list for each stack, from the first block on.

    A stack has numbered children, as those of ``nn.ModuleList`` are, of which at least two are of one class that has
    modules inside. They are ``repeated_blocks``, or stages that hold some. What is numbered inside a block (experts) is
    no stack of its own.
    """
    blocks = repeated_blocks(model)
    return [stack for stack in _numbered(model) if any(inside(block, path) for path in stack for block in blocks)]


def outermost(model: nn.Module, classes: Iterable[str]) -> list[nn.Module]:
    """Return the modules of these classes inside ``model``, in its order; of those inside each other the outer ones."""
    wanted, inner, chosen = frozenset(classes), set[nn.Module](), []
    for module in model.modules():
        if type(module).__name__ in wanted and module is not model and module not in inner:
            chosen.append(module)
            inner.update(module.modules())
    return chosen


def inside(path: str, block: str) -> bool:
    """Return True if the module or parameter at ``path`` is in the module at ``block``, or is it."""
    return f"{path}.".startswith(f"{block}.")


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of the hidden layers: two-dimensional parameters in repeated blocks, without embeddings."""
    blocks = [model.get_submodule(path) for stack in stacks_of(model) for path in stack]
    layers = (layer for block in blocks for layer in block.modules() if not isinstance(layer, nn.Embedding))
    return {p for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 2}


def depths_from_top(model: nn.Module) -> dict[str, int]:
    """Return, by parameter name, how many blocks stand between a parameter and the model's end, itself included.

    It is 1 in the last block of a stack and n in the first of n. Embeddings, and what else stands before the first
    block, are below the longest stack: n + 1. All else, such as a head, is 0. Empty if nothing is repeated.
    """
    stacks = stacks_of(model)
    if not stacks:
        return {}
    bottom = 1 + max(len(stack) for stack in stacks)
    embeddings = {id(p) for layer in model.modules() if isinstance(layer, nn.Embedding) for p in layer.parameters()}
    in_block = {path: depth for stack in stacks for depth, path in enumerate(reversed(stack), 1)}
    depths: dict[str, int] = {}
    below = True
    for name, parameter in model.named_parameters():
        depth = next((depth for path, depth in in_block.items() if inside(name, path)), None)
        below = below and depth is None
        depths[name] = depth or (bottom if below or id(parameter) in embeddings else 0)
    return depths


def _numbered(model: nn.Module) -> list[list[str]]:
    """Return the paths of numbered children, in lists of which at least two are of one class with modules inside."""
    stacks: list[list[str]] = []
    for path, container in model.named_modules():
        if any(inside(path, block) for stack in stacks for block in stack):
            continue
        blocks = {
            f"{path}.{name}".lstrip("."): child
            for name, child in container.named_children()
            if name.isdigit() and any(child.children())
        }
        if any(count > 1 for count in Counter(map(type, blocks.values())).values()):
            stacks.append(list(blocks))
    return stacks


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())

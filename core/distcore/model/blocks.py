"""The repeated blocks of a model, such as the layers of a transformer: the only
definition in this project.

Sharding and compilation treat a block as one unit, pipelines are cut between blocks, and
layer decay counts blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward."""


def repeated_classes(model: nn.Module) -> frozenset[str]:
    """Return the class names of a model's blocks, and of other unsplittable
    modules, such as embeddings.

    They are the names in ``_no_split_modules``. Without this attribute they are the classes
    of numbered children, or else the largest class that occurs more than once, such as the layers
    of a plain ``nn.Sequential``. A layer without
    modules inside counts only there: any other parent may read its weights, and would read a shard.
    """
    stated = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    if present := frozenset(stated & {type(module).__name__ for module in model.modules()}):
        return present
    if numbered := [path for stack in _numbered(model) for path in stack]:
        return frozenset(type(model.get_submodule(path)).__name__ for path in numbered)
    read_elsewhere = set(_leaves_outside_of_sequences(model))
    modules = [
        module
        for module in model.modules()
        if _size(module)
        and not isinstance(module, CONTAINERS)
        and type(module) not in read_elsewhere
    ]
    counts = Counter(type(module) for module in modules)
    repeated = [module for module in modules if counts[type(module)] > 1]
    # One with modules inside comes first: the embeddings of a small model can be larger
    # than its blocks.
    largest = max(
        repeated, key=lambda module: (any(module.children()), _size(module)), default=None
    )
    return frozenset() if largest is None else frozenset({type(largest).__name__})


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's blocks by path, in its order: the modules of ``repeated_classes``
    that are in lists.

    Embeddings, which some models also list in ``_no_split_modules``, are therefore excluded. A
    single block in a list counts.
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
    """Return the paths of the model's stacked blocks: one list per stack, in order.

    A stack has numbered children, like ``nn.ModuleList``, and at least two of one class with
    submodules. The children are ``repeated_blocks``, or stages that contain them. Numbered modules
    inside a block, such as experts, are no stack.
    """
    blocks = repeated_blocks(model)
    return [
        stack
        for stack in _numbered(model)
        if any(inside(block, path) for path in stack for block in blocks)
    ]


def outermost(model: nn.Module, classes: Iterable[str]) -> list[nn.Module]:
    """Return the outermost modules of these classes inside ``model``, in the model's order."""
    wanted, inner, chosen = frozenset(classes), set[nn.Module](), []
    for module in model.modules():
        if type(module).__name__ in wanted and module is not model and module not in inner:
            chosen.append(module)
            inner.update(module.modules())
    return chosen


def inside(path: str, block: str) -> bool:
    """Return True if the module or parameter at ``path`` is in the module at
    ``block``, or is it.
    """
    return f"{path}.".startswith(f"{block}.")


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of the hidden layers: two-dimensional parameters in
    repeated blocks, without embeddings.
    """
    blocks = [model.get_submodule(path) for stack in stacks_of(model) for path in stack]
    layers = (
        layer
        for block in blocks
        for layer in block.modules()
        if not isinstance(layer, nn.Embedding)
    )
    return {p for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 2}


def depths_from_top(model: nn.Module) -> dict[str, int]:
    """Return the depth of each parameter, by name: the number of blocks from its own
    to the model's end.

    It is 1 in the last block of a stack and n in the first of n. Parameters before the first block,
    such as embeddings, have n + 1 of the longest stack. Others, such as a head, have 0. Empty
    without repeated blocks.
    """
    stacks = stacks_of(model)
    if not stacks:
        return {}
    bottom = 1 + max(len(stack) for stack in stacks)
    embeddings = {
        id(p)
        for layer in model.modules()
        if isinstance(layer, nn.Embedding)
        for p in layer.parameters()
    }
    in_block = {path: depth for stack in stacks for depth, path in enumerate(reversed(stack), 1)}
    depths: dict[str, int] = {}
    below = True
    for name, parameter in model.named_parameters():
        depth = next((depth for path, depth in in_block.items() if inside(name, path)), None)
        below = below and depth is None
        depths[name] = depth or (bottom if below or id(parameter) in embeddings else 0)
    return depths


def _numbered(model: nn.Module) -> list[list[str]]:
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


def _leaves_outside_of_sequences(model: nn.Module) -> Iterator[type[nn.Module]]:
    """Yield the class of each layer without modules inside whose parent calls it in a forward
    pass of its own.
    """
    for parent in model.modules():
        if not isinstance(parent, nn.Sequential):
            yield from (type(child) for child in parent.children() if not any(child.children()))


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())

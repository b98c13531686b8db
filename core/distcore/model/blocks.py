"""The repeated blocks of a model, such as a transformer's layers: the only definition of them.

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
    """Return the class names of a model's blocks, and of unsplittable modules such as embeddings.

    They are the names in ``_no_split_modules``. Without this attribute they are the classes of
    numbered children, or else the largest class that occurs more than once, such as the layers of a
    plain ``nn.Sequential``. A layer without modules inside counts only there: any other parent may
    read its weights, and would read a shard.
    """
    stated: set[str] = set()
    for module in model.modules():
        stated.update(getattr(module, "_no_split_modules", None) or ())
    names_of_classes = {type(module).__name__ for module in model.modules()}
    present = frozenset(stated & names_of_classes)
    if present:
        return present
    numbered = [path for stack in _numbered(model) for path in stack]
    if numbered:
        return frozenset(type(model.get_submodule(path)).__name__ for path in numbered)
    read_elsewhere = set(_leaves_outside_of_sequences(model))
    modules = []
    for module in model.modules():
        is_candidate = type(module) not in read_elsewhere and not isinstance(module, CONTAINERS)
        if is_candidate and _size(module):
            modules.append(module)
    counts = Counter(type(module) for module in modules)
    repeated = [module for module in modules if counts[type(module)] > 1]
    if not repeated:
        return frozenset()

    # One with modules inside comes first: the embeddings of a small model can be larger than its
    # blocks.
    def by_size(module: nn.Module) -> tuple[bool, int]:
        return any(module.children()), _size(module)

    largest = max(repeated, key=by_size)
    return frozenset({type(largest).__name__})


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's blocks by path, in its order.

    They are the modules of ``repeated_classes`` that are in lists. Embeddings, which some models
    also list in ``_no_split_modules``, are therefore excluded. A single block in a list counts.
    """
    classes = repeated_classes(model)
    blocks = {}
    for path, container in model.named_modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            for name, child in container.named_children():
                if type(child).__name__ in classes:
                    blocks[f"{path}.{name}".lstrip(".")] = child
    return blocks


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
    wanted = frozenset(classes)
    chosen: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in wanted and module is not model and module not in inner:
            chosen.append(module)
            inner.update(module.modules())
    return chosen


def inside(path: str, block: str) -> bool:
    """Return True if the module or parameter at ``path`` is in the module at ``block``, or it."""
    return f"{path}.".startswith(f"{block}.")


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of the hidden layers.

    They are two-dimensional parameters in repeated blocks, without embeddings.
    """
    matrices: set[nn.Parameter] = set()
    for path in (path for stack in stacks_of(model) for path in stack):
        for layer in model.get_submodule(path).modules():
            if not isinstance(layer, nn.Embedding):
                matrices.update(p for p in layer.parameters(recurse=False) if p.ndim == 2)
    return matrices


def depths_from_top(model: nn.Module) -> dict[str, int]:
    """Return the depth of each parameter, by name: the blocks from its own to the model's end.

    It is 1 in the last block of a stack and n in the first of n. Parameters before the first block,
    such as embeddings, have n + 1 of the longest stack. Others, such as a head, have 0. Empty
    without repeated blocks.
    """
    stacks = stacks_of(model)
    if not stacks:
        return {}
    bottom = 1 + max(len(stack) for stack in stacks)
    embeddings: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            embeddings.update(id(parameter) for parameter in layer.parameters())
    depth_of_block = {}
    for stack in stacks:
        for depth, path in enumerate(reversed(stack), 1):
            depth_of_block[path] = depth
    depths: dict[str, int] = {}
    is_below_blocks = True
    for name, parameter in model.named_parameters():
        blocks_around = (depth for path, depth in depth_of_block.items() if inside(name, path))
        depth = next(blocks_around, 0)
        is_below_blocks = is_below_blocks and not depth
        if not depth and (is_below_blocks or id(parameter) in embeddings):
            depth = bottom
        depths[name] = depth
    return depths


def _numbered(model: nn.Module) -> list[list[str]]:
    """Return the paths of numbered children, by stack: at least two are of one class."""
    stacks: list[list[str]] = []
    for path, container in model.named_modules():
        if any(inside(path, block) for stack in stacks for block in stack):
            continue
        blocks = {
            f"{path}.{name}".lstrip("."): child
            for name, child in container.named_children()
            if name.isdigit() and any(child.children())
        }
        class_counts = Counter(map(type, blocks.values()))
        if any(count > 1 for count in class_counts.values()):
            stacks.append(list(blocks))
    return stacks


def _leaves_outside_of_sequences(model: nn.Module) -> Iterator[type[nn.Module]]:
    """Yield the class of each layer without modules inside that a parent's own forward calls."""
    for parent in model.modules():
        if isinstance(parent, nn.Sequential):
            continue
        for child in parent.children():
            if not any(child.children()):
                yield type(child)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())

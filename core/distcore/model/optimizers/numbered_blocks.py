"""The repeated blocks of a model, such as the layers of a transformer: which they are, and how deep each stands."""

from __future__ import annotations

from collections import Counter

from torch import nn


def stacks_of(module: nn.Module) -> list[list[str]]:
    """Return the paths of the model's repeated blocks, one list for each stack of them, from the first block on.

    A stack has numbered children, as those of ``nn.ModuleList`` are, of which at least two are of one class that has
    modules inside. What is numbered inside a block (experts) is no stack of its own.
    """
    stacks: list[list[str]] = []
    for path, container in module.named_modules():
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


def inside(path: str, block: str) -> bool:
    """Return True if the module or parameter at ``path`` is in the module at ``block``, or is it."""
    return f"{path}.".startswith(f"{block}.")


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of the hidden layers: two-dimensional parameters in repeated blocks, without embeddings."""
    blocks = [module.get_submodule(path) for stack in stacks_of(module) for path in stack]
    layers = (layer for block in blocks for layer in block.modules() if not isinstance(layer, nn.Embedding))
    return {p for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 2}


def depths_from_top(module: nn.Module) -> dict[str, int]:
    """Return, by parameter name, how many blocks stand between a parameter and the model's end, itself included.

    It is 1 in the last block of a stack and n in the first of n. Embeddings, and what else stands before the first
    block, are below the longest stack: n + 1. All else, such as a head, is 0. Empty if nothing is repeated.
    """
    stacks = stacks_of(module)
    if not stacks:
        return {}
    bottom = 1 + max(len(stack) for stack in stacks)
    embeddings = {id(p) for layer in module.modules() if isinstance(layer, nn.Embedding) for p in layer.parameters()}
    in_block = {path: depth for stack in stacks for depth, path in enumerate(reversed(stack), 1)}
    found: dict[str, int] = {}
    below = True
    for name, parameter in module.named_parameters():
        depth = next((depth for path, depth in in_block.items() if inside(name, path)), None)
        below = below and depth is None
        found[name] = depth or (bottom if below or id(parameter) in embeddings else 0)
    return found

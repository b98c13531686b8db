"""Split a model into pipeline stages. Placeholders replace the modules of other stages.

A placeholder without parameters replaces each block of another stage. The one before a stage's own
blocks receives the hidden state, the one after them sends it on. Modules before the blocks, such as
embeddings, belong to the first stage. Modules after them, such as the head, belong to the last. In
other stages these modules compute with zero-storage weights, so that all shapes are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from distcore import StrategyError
from distcore.model import repeated_blocks
from distcore_mesh.placeholders import StagePlaceholder, make_zero_storage, zero_storage_copy
from distcore_mesh.stages import Stages

EXTRA_STATE = "_extra_state"
"""torch's name of a layer's state that is neither parameter nor buffer."""


def keep_stage_parameters(
    optimizer: Optimizer, whole: Mapping[str, nn.Parameter], model: nn.Module
) -> Optimizer:
    """Remove from an optimizer of the ``whole`` model the parameters that a stage lacks.

    The optimizer is made for the whole model, because learning rates depend on all its names and
    blocks. ``model`` is the stage.
    """
    names = {parameter: name for name, parameter in whole.items()}
    parameters_of_stage = dict(model.named_parameters())
    for group in optimizer.param_groups:
        names_of_group = [names[parameter] for parameter in group["params"]]
        group["params"] = [
            parameters_of_stage[name] for name in names_of_group if name in parameters_of_stage
        ]
    return optimizer


def check_stages(model: nn.Module, pp: int, chunks: int = 1) -> None:
    """Raise StrategyError, one line, unless ranks can share the model's blocks.

    There are ``pp`` ranks with ``chunks`` stages each. ``model`` may be on the meta device.
    """
    where = f"strategy_options.pp = {pp}"
    path, blocks = _find_stack(model, where)
    if len(blocks) % (pp * chunks):
        count = len(blocks)
        divisors = [number for number in range(1, count + 1) if count % number == 0]
        possible = ", ".join(map(str, divisors))
        product = "" if chunks == 1 else f"pp * pp_chunks = {pp * chunks} "
        raise StrategyError(
            f"{where}: {product}must divide the model's {len(blocks)} blocks (possible: {possible})"
        )
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first_names.setdefault(id(parameter), name)
        if other != name:
            raise StrategyError(
                f"{where}: {other} and {name} are one weight, which two stages cannot share; untie"
                " them"
            )
    for owner in _ancestors(path):
        module = model.get_submodule(owner)
        for name, _ in module.named_parameters(recurse=False):
            raise StrategyError(f"{where}: {name!r} of {type(module).__name__} is in no stage")
    state = model.state_dict().keys()
    for name, _ in model.named_buffers():
        if name in state and _is_inside(name, path):
            raise StrategyError(
                f"{where}: {name} is a running statistic of a block, which other stages cannot see"
            )
    for name in state:
        if name.endswith(EXTRA_STATE):
            raise StrategyError(
                f"{where}: {name} is state of a layer of one stage, which a checkpoint would miss"
            )


def split_into_stages(
    model: nn.Module, stages: Stages, dtype: torch.dtype, device: torch.device
) -> frozenset[str]:
    """Replace the modules of other stages in ``model``, in place.

    Returns the names of this rank's parameters. Placeholders compute in ``dtype``, on ``device``.
    Raises StrategyError as ``check_stages`` does.
    """
    check_stages(model, stages.size, stages.chunks)
    path, blocks = _find_stack(model, "")
    stages.share_blocks(len(blocks))
    chunks = [stages.chunk_of(index // stages.blocks) for index in range(len(blocks))]
    modules = {_inside(path, index) for index, chunk in enumerate(chunks) if chunk is not None}
    modules |= set(_split_around(model, path, stages, dtype, device))
    prefixes = tuple(f"{name}." for name in modules)
    parameters = frozenset(
        name for name, _ in model.named_parameters() if name.startswith(prefixes)
    )
    container = cast(nn.ModuleList, model.get_submodule(path))
    for index, (block, chunk) in enumerate(zip(blocks, chunks, strict=True)):
        placeholder = StagePlaceholder(block, partial(stages.pass_placeholder, index))
        stages.calls.watch(index, placeholder)
        if chunk is None:
            for module in block.modules():
                make_zero_storage(module, dtype, device)
            block.to(device)
            container[index] = placeholder
        else:
            stages.calls.watch(index, block)
            stages.replace_outside(chunk, (container._modules, str(index), placeholder))
    return parameters


def _split_around(
    model: nn.Module,
    path: str,
    stages: Stages,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[str]:
    """Keep modules before the blocks in the first stage, and those after them in the last.

    Yields the names of this rank's modules.
    """
    before, after = _modules_around(model, path)
    last = stages.size * stages.chunks - 1
    for names, stage, misplaced in ((before, 0, "after"), (after, last, "before")):
        chunk = stages.chunk_of(stage)
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(partial(_check_order, stages, name, misplaced))
            if chunk is None:
                make_zero_storage(module, dtype, device)
                continue
            owner, _, attribute = name.rpartition(".")
            siblings = model.get_submodule(owner)._modules
            stand_in = zero_storage_copy(module, dtype, device)
            stages.replace_outside(chunk, (siblings, attribute, stand_in))
            yield name


def _check_order(
    stages: Stages, name: str, misplaced: str, _module: nn.Module, _inputs: object
) -> None:
    """Raise StrategyError if a module is called on the wrong side of the blocks."""
    # ``has_exchanged`` is None while a backward pass recomputes activations.
    if stages.has_exchanged is (misplaced == "after"):
        raise StrategyError(
            f"strategy 'mesh': with pp {name} is in the wrong stage: the model calls it {misplaced}"
            " the blocks"
        )


def _find_stack(model: nn.Module, where: str) -> tuple[str, list[nn.Module]]:
    """Return the name of the one list that holds the model's blocks, and the blocks."""
    blocks = set(repeated_blocks(model).values())
    stacks: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        if all(block in blocks for block in module):
            stacks[name] = list(module)
    if len(stacks) != 1:
        listed = ", ".join(stacks) or "none"
        name = type(model).__name__
        raise StrategyError(
            f"{where}: needs a model with one list of repeated blocks; {name} has: {listed}"
        )
    return next(iter(stacks.items()))


def _inside(path: str, name: object) -> str:
    """Return the full name of ``name`` inside the module ``path``; '' is the model itself."""
    return f"{path}.{name}" if path else f"{name}"


def _is_inside(name: str, path: str) -> bool:
    return name.startswith(_inside(path, ""))


def _ancestors(path: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module, the model's own (empty) name first."""
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(len(parts)))


def _modules_around(model: nn.Module, path: str) -> tuple[list[str], list[str]]:
    """Return the names of the modules with own parameters before and after the blocks.

    Names are in the order of registration. ``_check_order`` reports a model that calls
    them in another order.
    """
    before: list[str] = []
    after: list[str] = []
    names = before
    for name, module in model.named_modules():
        if name == path:
            names = after
            continue
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if has_parameters and not _is_inside(name, path):
            names.append(name)
    return before, after

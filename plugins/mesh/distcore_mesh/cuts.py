"""Cutting a model into stages: what a rank does not hold of it stays in its place, absent.

Where a block of another stage was stands a module without parameters: the one before a stage's own blocks receives the
hidden state, the one behind them sends it on. What comes before the blocks, such as embeddings, belongs to the first
stage; what comes behind them, such as the head, to the last. In other stages these modules compute with zeros that take
no memory, so that all shapes are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from distcore import StrategyError, repeated_blocks
from distcore_mesh.absent import Absent, hollow, hollow_twin
from distcore_mesh.stages import Stages


def of_stage(optimizer: Optimizer, whole: Mapping[str, nn.Parameter], model: nn.Module) -> Optimizer:
    """Have an optimizer step what ``model`` has left of the ``whole`` model's parameters, by their names.

    Its groups stay: they say which learning rate a parameter has by the names and the number of blocks of the whole.
    """
    names = {parameter: name for name, parameter in whole.items()}
    left = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [left[names[each]] for each in group["params"] if names[each] in left]
    return optimizer


def check_stages(model: nn.Module, pp: int, chunks: int = 1) -> None:
    """Raise StrategyError, one line, unless ``pp`` ranks can share the blocks of ``model``, also of a skeleton.

    Of each of them ``chunks`` stages.
    """
    where = f"strategy_options.pp = {pp}"
    path, blocks = _stack(model, where)
    if len(blocks) % (pp * chunks):
        possible = ", ".join(str(number) for number in range(1, len(blocks) + 1) if len(blocks) % number == 0)
        product = "" if chunks == 1 else f"pp * pp_chunks = {pp * chunks} "
        raise StrategyError(f"{where}: {product}must divide the model's {len(blocks)} blocks (possible: {possible})")
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (other := first.setdefault(id(parameter), name)) != name:
            raise StrategyError(
                f"{where}: {other} and {name} are one weight, which two stages cannot share; untie them"
            )
    for owner in _ancestors(path):
        if own := next(model.get_submodule(owner).named_parameters(recurse=False), None):
            raise StrategyError(f"{where}: {own[0]!r} of {type(model.get_submodule(owner)).__name__} is in no stage")
    state = model.state_dict().keys()
    buffers = [name for name, _ in model.named_buffers() if name in state and _is_inside(name, path)]
    if buffers:
        raise StrategyError(f"{where}: {buffers[0]} is a running statistic of a block, which other stages cannot see")


def cut_into_stages(model: nn.Module, stages: Stages, dtype: torch.dtype, device: torch.device) -> frozenset[str]:
    """Leave in ``model`` what this rank holds, in place; return the names of its parameters.

    ``dtype`` is what parameters are computed in, on ``device``. Raises StrategyError as ``check_stages`` does.
    """
    check_stages(model, stages.size, stages.chunks)
    path, blocks = _stack(model, "")
    stages.blocks = len(blocks) // (stages.size * stages.chunks)
    chunks = [stages.chunk_of(index // stages.blocks) for index in range(len(blocks))]
    kept = {_inside(path, index) for index, chunk in enumerate(chunks) if chunk is not None}
    kept |= {*_cut_around(model, path, stages, dtype, device)}
    mine = frozenset(name for name, _ in model.named_parameters() if name.startswith(tuple(f"{k}." for k in kept)))
    container = cast(nn.ModuleList, model.get_submodule(path))
    for index, (block, chunk) in enumerate(zip(blocks, chunks, strict=True)):
        absent = Absent(block, partial(stages.behind_absent, index))
        if chunk is None:
            for module in block.modules():
                hollow(module, dtype, device)
            block.to(device)
            container[index] = absent
        else:
            stages.only_in(chunk, (container._modules, str(index), absent))
    return mine


def _cut_around(model: nn.Module, path: str, stages: Stages, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Leave what is outside of the blocks in the first stage and the last; yield the names of what this rank has."""
    before, behind = _around(model, path)
    last = stages.size * stages.chunks - 1
    for names, stage, misplaced in ((before, 0, "behind"), (behind, last, "before")):
        chunk = stages.chunk_of(stage)
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(partial(_check_order, stages, name, misplaced))
            if chunk is None:
                hollow(module, dtype, device)
                continue
            owner, _, attribute = name.rpartition(".")
            place = model.get_submodule(owner)._modules
            stages.only_in(chunk, (place, attribute, hollow_twin(module, dtype, device)))
            yield name


def _check_order(stages: Stages, name: str, misplaced: str, _module: nn.Module, _inputs: object) -> None:
    if stages.past is (misplaced == "behind"):  # not where activations are computed again in a backward pass
        raise StrategyError(
            f"strategy 'mesh': with pp {name} is in the wrong stage: the model calls it {misplaced} the blocks"
        )


def _stack(model: nn.Module, where: str) -> tuple[str, list[nn.Module]]:
    """Return the name of the one list that has the model's blocks, and these."""
    blocks = set(repeated_blocks(model).values())
    found = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and all(block in blocks for block in module)
    }
    if len(found) != 1:
        listed = ", ".join(found) or "none"
        what = type(model).__name__
        raise StrategyError(f"{where}: needs a model with one list of repeated blocks; {what} has: {listed}")
    return next(iter(found.items()))


def _inside(path: str, name: object) -> str:
    """Return the name of something inside a module; the model's own path is empty."""
    return f"{path}.{name}" if path else f"{name}"


def _is_inside(name: str, path: str) -> bool:
    return name.startswith(_inside(path, ""))


def _ancestors(path: str) -> Iterator[str]:
    """Yield the names of the modules around a module, the model's own (empty) first."""
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(len(parts)))


def _around(model: nn.Module, path: str) -> tuple[list[str], list[str]]:
    """Return the names of modules with parameters of their own before the blocks, and behind them.

    In the order in which the model registers them; what it calls in another order is noticed as it runs.
    """
    before: list[str] = []
    behind: list[str] = []
    found = before
    for name, module in model.named_modules():
        if name == path:
            found = behind
        elif not _is_inside(name, path) and any(True for _ in module.parameters(recurse=False)):
            found.append(name)
    return before, behind

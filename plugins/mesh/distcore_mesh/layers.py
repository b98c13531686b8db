"""Split layers: each rank holds a part of the weights and computes with it; what the parts give is joined.

Weights are plain tensors, replaced in place, so that a weight that two modules share stays shared. The forward pass
runs the modules' own code on the parts.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore import StrategyError, repeated_blocks
from distcore_mesh.group import Group
from distcore_mesh.logits import keep_split
from distcore_mesh.plans import Plan
from distcore_mesh.sequences import Sequences
from distcore_mesh.splits import Split
from distcore_mesh.tokens import split_tokens

log = logging.getLogger("distcore")
GATHERED = "colwise_gather_output"
"""The style of a head whose outputs are gathered."""
WHOLE_OUTPUT = ("embedding_rowwise", GATHERED, "rowwise_split_input")
"""Styles of modules whose inputs and outputs are whole, so that nothing else changes if they are left whole, too."""


def split_layers(
    model: nn.Module, plan: Plan, group: Group, by_tokens: bool = False, splits_logits: bool = False
) -> tuple[dict[str, Split], Sequences | None]:
    """Split the modules that the plan names, in place; return how each parameter that was split is laid out.

    With ``by_tokens`` blocks have a part of each sequence between split layers; return what they know of these, too.
    With ``splits_logits`` outputs that the plan gathers stay split for the loss.
    Raises StrategyError, one line, for what cannot be split among so many ranks, with the numbers that could.
    """
    styles = styles_for(model, plan, group.size)
    splits = _splits_by(model, styles)
    tokens = split_tokens(model, styles, splits, group) if by_tokens else None
    inside = {id(module) for block in repeated_blocks(model).values() for module in block.modules()}
    with torch.no_grad():
        for name, split in splits.items():
            parameter = model.get_parameter(name)
            parameter.data = split.part_of(parameter.data, group.rank, group.size)
    head = keep_split if splits_logits else _gathering
    for name, style in styles.items():
        is_inside = style != "divided" and id(model.get_submodule(name)) in inside
        _change(model, name, style, group, tokens if is_inside else None)
        if style == GATHERED:  # in a block it is no head
            model.get_submodule(name).register_forward_hook((_gathering if is_inside else head)(group))
    log.info("mesh: %d tensors are split over %d ranks by %s", len(splits), group.size, plan.source)
    return splits, tokens


def styles_for(model: nn.Module, plan: Plan, ranks: int) -> dict[str, str]:
    """Return the style of each part of ``model``, also of a skeleton, that is split over so many ranks.

    Raises StrategyError, one line, for what cannot be split among so many, with the numbers that could.
    """
    styles = _without_whole(model, plan, ranks)
    _check_sizes(model, styles, ranks)
    return styles


def splits_of(model: nn.Module, plan: Plan, ranks: int) -> dict[str, Split]:
    """Return how each parameter of ``model``, also of a skeleton, that is split over so many ranks is laid out.

    Raises StrategyError as ``styles_for`` does.
    """
    return _splits_by(model, styles_for(model, plan, ranks))


def check_head(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise StrategyError, one line, unless ``styles`` split the head of ``model``, also a skeleton, by vocabulary."""
    if GATHERED not in styles.values():
        what = type(model).__name__
        raise StrategyError(
            f"strategy_options.loss_parallel: the plan splits no head of {what} ({GATHERED}), or its vocabulary does "
            "not divide; leave it out"
        )


def _without_whole(model: nn.Module, plan: Plan, ranks: int) -> dict[str, str]:
    """Leave out the modules that can as well be whole, where they cannot be split: as a vocabulary of odd size.

    So is a weight that another module uses that the plan does not name. Raises StrategyError for such a one that
    cannot be whole.
    """
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(name)
    whole: set[str] = set()
    for group in owners.values():
        planned = [name for name in group if plan.styles.get(name, "divided") != "divided"]
        dimensions = {_dimension(model.get_submodule(name), plan.styles[name]) for name in planned}
        uneven = any(plan.styles[name] in WHOLE_OUTPUT and _uneven(model, name, plan, ranks) for name in planned)
        if planned and (uneven or len(planned) < len(group) or len(dimensions) > 1):
            fixed = next((name for name in planned if plan.styles[name] not in WHOLE_OUTPUT), None)
            if fixed is not None:
                raise StrategyError(
                    f"{plan.source}: {fixed!r} shares its weight with {next(n for n in group if n != fixed)!r}, which "
                    "is not split alike"
                )
            whole |= set(planned)
    if whole:
        log.info("mesh: whole on every rank, though the plan names them: %s", ", ".join(sorted(whole)))
    return {name: style for name, style in plan.styles.items() if name not in whole}


def _uneven(model: nn.Module, name: str, plan: Plan, ranks: int) -> bool:
    module, style = model.get_submodule(name), plan.styles[name]
    return bool(_weight(module, name, style).shape[_dimension(module, style)] % ranks)


def _check_sizes(model: nn.Module, styles: dict[str, str], ranks: int) -> None:
    """Raise StrategyError unless ``ranks`` divides the heads and the sizes of all that is split."""
    sizes: dict[str, int] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for key in ("num_attention_heads", "num_key_value_heads"):
            if isinstance(count := getattr(config, key, None), int):
                sizes[key] = count
    for name, style in styles.items():
        if style == "divided":
            path, _, attribute = name.rpartition(".")
            sizes[name] = getattr(model.get_submodule(path), attribute)
        elif style != "replicated_with_grad_allreduce":
            module = model.get_submodule(name)
            parts = 3 if style == "qkv_colwise" else 1
            sizes[name] = _weight(module, name, style).shape[_dimension(module, style)] // parts
    if wrong := next((name for name, size in sizes.items() if size % ranks), None):
        common = gcd(*sizes.values())
        possible = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
        raise StrategyError(
            f"strategy_options.tp = {ranks}: must divide {wrong} = {sizes[wrong]} (possible: {possible})"
        )


def _splits_by(model: nn.Module, styles: dict[str, str]) -> dict[str, Split]:
    """Return how each parameter is laid out, by its first name in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Split] = {}
    for name, style in styles.items():
        if style in ("divided", "replicated_with_grad_allreduce"):
            continue
        module = model.get_submodule(name)
        parts = 3 if style == "qkv_colwise" else 1
        weight, bias = _weight(module, name, style), getattr(module, "bias", None)
        found[names[id(weight)]] = Split(_dimension(module, style), parts, tuple(weight.shape))
        if isinstance(bias, nn.Parameter) and "colwise" in style:
            found[names[id(bias)]] = Split(0, parts, tuple(bias.shape))
    return found


def _weight(module: nn.Module, name: str, style: str) -> nn.Parameter:
    weight = getattr(module, "weight", None)
    known = type(module).forward is nn.Linear.forward or _is_conv1d(module)
    if style.startswith("embedding"):
        known = isinstance(module, nn.Embedding)
    if not known or not isinstance(weight, nn.Parameter):
        raise StrategyError(f"strategy 'mesh': {name} is a {type(module).__name__}, which cannot be split {style!r}")
    return weight


def _is_conv1d(module: nn.Module) -> bool:
    """True for transformers' ``Conv1D``: a linear layer whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _dimension(module: nn.Module, style: str) -> int:
    """Return the dimension of the weight that is split."""
    first = style in ("colwise", "qkv_colwise", "colwise_gather_output", "embedding_rowwise")
    return int(first) if _is_conv1d(module) else int(not first)


def _change(model: nn.Module, name: str, style: str, group: Group, tokens: Sequences | None) -> None:
    if style == "divided":
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        setattr(owner, attribute, getattr(owner, attribute) // group.size)
        return
    module: Any = model.get_submodule(name)
    if style in ("colwise", "qkv_colwise", "colwise_gather_output"):
        if tokens is None:  # else what has the module has gathered the tokens for it
            module.register_forward_pre_hook(lambda _module, inputs: (group.enter(inputs[0]), *inputs[1:]))
        if _is_conv1d(module):
            module.nf //= group.size
        else:
            module.out_features //= group.size
    if style in ("rowwise", "rowwise_split_input"):
        add = group.add if tokens is None else tokens.add
        module.forward = partial(_rowwise, module, add, group if style == "rowwise_split_input" else None)
    elif style == "embedding_rowwise":
        _split_vocabulary(module, group)
    elif style == "replicated_with_grad_allreduce":
        module.forward = partial(_with_entered_parameters, module, group, module.forward)


def _gathering(group: Group) -> Callable[..., Tensor]:
    return lambda _module, _inputs, output: group.gather(output)


def _rowwise(module: Any, add: Callable[[Tensor], Tensor], splits_by: Group | None, inputs: Tensor) -> Tensor:
    part = splits_by.own_part(inputs) if splits_by else inputs
    product = part @ module.weight if _is_conv1d(module) else F.linear(part, module.weight)
    total = add(product)
    # Once, after the sum; in its dtype, as a linear layer under autocast adds it.
    return total if module.bias is None else total + module.bias.to(total.dtype)


def _split_vocabulary(module: Any, group: Group) -> None:
    """Have an embedding look up its own tokens, and take the vectors of others as 0, before they are summed."""
    count = module.num_embeddings // group.size
    first, foreign = group.rank * count, list[Tensor]()

    def own_tokens(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens = inputs[0] - first
        foreign[:] = [(tokens < 0) | (tokens >= count)]
        return tokens.masked_fill(foreign[0], 0), *inputs[1:]

    def summed(_module: nn.Module, _inputs: object, vectors: Tensor) -> Tensor:
        return group.add(vectors.masked_fill(foreign.pop().unsqueeze(-1), 0))

    padding = module.padding_idx
    module.padding_idx = padding - first if padding is not None and first <= padding < first + count else None
    module.num_embeddings = count
    module.register_forward_pre_hook(own_tokens)
    module.register_forward_hook(summed)


def _with_entered_parameters(module: nn.Module, group: Group, forward: Callable[..., Any], *inputs: Any) -> Any:
    """Run ``forward`` on parameters whose gradients are summed over the ranks."""
    own: dict[str, Any] = dict(module._parameters)
    try:
        for name, parameter in own.items():
            if parameter is not None:
                module._parameters[name] = group.enter_alone(parameter)  # type: ignore[assignment]
        return forward(*inputs)
    finally:
        module._parameters.update(own)

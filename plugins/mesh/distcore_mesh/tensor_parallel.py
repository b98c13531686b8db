"""Tensor parallelism: each rank computes with its part of the weights, and
collectives join the results.

Weights stay plain tensors and are replaced in place, so that tied weights stay tied. The forward
pass runs the modules' own code on the parts.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore import StrategyError
from distcore.model import repeated_blocks
from distcore_mesh.adapters import tell_of_dropouts
from distcore_mesh.context_parallel import SplitSequences
from distcore_mesh.loss_parallel import keep_split
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.sequence_parallel import split_tokens
from distcore_mesh.tensor_layout import TensorSplit
from distcore_mesh.tp_plans import GATHERED, TPPlan

log = logging.getLogger("distcore")
WHOLE_OUTPUT = ("embedding_rowwise", GATHERED, "rowwise_split_input")
"""Styles of modules with whole inputs and outputs. Such a module can stay whole
without a change elsewhere.
"""


def split_layers(
    model: nn.Module,
    plan: TPPlan,
    group: ParallelGroup,
    by_tokens: bool = False,
    splits_logits: bool = False,
) -> tuple[dict[str, TensorSplit], SplitSequences | None]:
    """Split the modules that the plan names, in place. Return the split of each parameter,
    and that of sequences.

    With ``by_tokens``, each rank has a part of every sequence between split layers. With
    ``splits_logits``, outputs that the plan gathers stay split for the loss. Raises StrategyError
    as ``styles_for`` does, and for a weight to be split whose gradient has a hook.
    """
    styles = styles_for(model, plan, group.size)
    splits = _splits_of_styles(model, styles)
    _refuse_hooks(model, splits)
    tokens = split_tokens(model, styles, splits, group) if by_tokens else None
    inside = {id(module) for block in repeated_blocks(model).values() for module in block.modules()}
    with torch.no_grad():
        for name, split in splits.items():
            parameter = model.get_parameter(name)
            parameter.data = split.part_of(parameter.data, group.rank, group.size)
    head = keep_split if splits_logits else _gather_hook
    for name, style in styles.items():
        is_inside = style != "divided" and id(model.get_submodule(name)) in inside
        _split_module(model, name, style, group, tokens if is_inside else None)
        if style == GATHERED:  # a head, unless it is inside a block
            model.get_submodule(name).register_forward_hook(
                (_gather_hook if is_inside else head)(group)
            )
    tell_of_dropouts(model, styles, (group.rank, group.size))
    log.info("mesh: %d tensors are split over %d ranks by %s", len(splits), group.size, plan.source)
    return splits, tokens


def _refuse_hooks(model: nn.Module, splits: Iterable[str]) -> None:
    """Raise StrategyError for a split weight with a hook: the hook was written
    for the whole gradient.
    """
    for name in splits:
        parameter: Any = model.get_parameter(name)
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise StrategyError(
                f"strategy 'mesh': the gradient of {name!r} has a hook, which would get a rank's"
                " part of it, as tp splits this weight; leave its layer out of the plan, or take a"
                " strategy that keeps weights whole"
            )


def styles_for(model: nn.Module, plan: TPPlan, ranks: int) -> dict[str, str]:
    """Return the style of each module of ``model`` that is split over ``ranks`` ranks.

    ``model`` may be on the meta device. Raises StrategyError, one line with the possible numbers of
    ranks, if ``ranks`` does not divide the sizes.
    """
    styles = _select_split_modules(model, plan, ranks)
    _check_sizes(model, styles, ranks)
    return styles


def splits_of(model: nn.Module, plan: TPPlan, ranks: int) -> dict[str, TensorSplit]:
    """Return the split of each parameter of ``model`` over ``ranks`` ranks. ``model`` may be
    on the meta device.

    Raises StrategyError as ``styles_for`` does.
    """
    return _splits_of_styles(model, styles_for(model, plan, ranks))


def _select_split_modules(model: nn.Module, plan: TPPlan, ranks: int) -> dict[str, str]:
    """Return the plan's styles without the modules that stay whole, and log these.

    A module stays whole if its size does not divide, such as an odd vocabulary, or if the plan does
    not split all users of its weight alike. Raises StrategyError if such a module cannot stay
    whole.
    """
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(name)
    whole: set[str] = set()
    for group in owners.values():
        named = [name for name in group if plan.styles.get(name, "divided") != "divided"]
        dimensions = {_dimension(model.get_submodule(name), plan.styles[name]) for name in named}
        uneven = any(
            plan.styles[name] in WHOLE_OUTPUT and _is_uneven(model, name, plan, ranks)
            for name in named
        )
        if named and (uneven or len(named) < len(group) or len(dimensions) > 1):
            fixed = next((name for name in named if plan.styles[name] not in WHOLE_OUTPUT), None)
            if fixed is not None:
                raise StrategyError(
                    f"{plan.source}: {fixed!r} shares its weight with"
                    f" {next(n for n in group if n != fixed)!r}, which is not split alike"
                )
            whole |= set(named)
    if whole:
        log.info(
            "mesh: whole on every rank, though the plan names them: %s", ", ".join(sorted(whole))
        )
    return {name: style for name, style in plan.styles.items() if name not in whole}


def _is_uneven(model: nn.Module, name: str, plan: TPPlan, ranks: int) -> bool:
    module, style = model.get_submodule(name), plan.styles[name]
    return bool(_weight(module, name, style).shape[_dimension(module, style)] % ranks)


def _check_sizes(model: nn.Module, styles: dict[str, str], ranks: int) -> None:
    """Raise StrategyError unless ``ranks`` divides the number of heads and every
    size that is split.
    """
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
            module, dimension = (
                model.get_submodule(name),
                _dimension(model.get_submodule(name), style),
            )
            # a block of 4-bit weights
            together = getattr(module, "columns_together", 1) if dimension == 1 else 1
            parts = 3 if style == "qkv_colwise" else together
            sizes[name] = _weight(module, name, style).shape[dimension] // parts
    if wrong := next((name for name, size in sizes.items() if size % ranks), None):
        common = gcd(*sizes.values())
        possible = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
        raise StrategyError(
            f"strategy_options.tp = {ranks}: must divide {wrong} = {sizes[wrong]} (possible:"
            f" {possible})"
        )


def _splits_of_styles(model: nn.Module, styles: dict[str, str]) -> dict[str, TensorSplit]:
    """Return the split of each parameter, by the parameter's first name in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    splits: dict[str, TensorSplit] = {}
    for name, style in styles.items():
        if style in ("divided", "replicated_with_grad_allreduce"):
            continue
        module = model.get_submodule(name)
        parts = 3 if style == "qkv_colwise" else 1
        weight, bias = _weight(module, name, style), getattr(module, "bias", None)
        splits[names[id(weight)]] = TensorSplit(
            _dimension(module, style), parts, tuple(weight.shape)
        )
        if isinstance(bias, nn.Parameter) and "colwise" in style:
            splits[names[id(bias)]] = TensorSplit(0, parts, tuple(bias.shape))
    return splits


def _weight(module: nn.Module, name: str, style: str) -> nn.Parameter:
    weight = getattr(module, "weight", None)
    known = (
        type(module).forward is nn.Linear.forward
        or _is_conv1d(module)
        or hasattr(module, "product")
    )
    if style.startswith("embedding"):
        known = isinstance(module, nn.Embedding)
    if not known or not isinstance(weight, nn.Parameter):
        raise StrategyError(
            f"strategy 'mesh': {name} is a {type(module).__name__}, which cannot be split {style!r}"
        )
    return weight


def _is_conv1d(module: nn.Module) -> bool:
    """Return True for transformers' ``Conv1D``: a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _dimension(module: nn.Module, style: str) -> int:
    """Return the dimension along which the weight is split."""
    first = style in ("colwise", "qkv_colwise", "colwise_gather_output", "embedding_rowwise")
    return int(first) if _is_conv1d(module) else int(not first)


def _split_module(
    model: nn.Module, name: str, style: str, group: ParallelGroup, tokens: SplitSequences | None
) -> None:
    if style == "divided":
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        setattr(owner, attribute, getattr(owner, attribute) // group.size)
        return
    module: Any = model.get_submodule(name)
    if style in ("colwise", "qkv_colwise", "colwise_gather_output"):
        if tokens is None:  # else the parent module has gathered the tokens
            module.register_forward_pre_hook(
                lambda _module, inputs: (group.enter(inputs[0]), *inputs[1:])
            )
        if _is_conv1d(module):
            module.nf //= group.size
        else:
            module.out_features //= group.size
    if style in ("rowwise", "rowwise_split_input"):
        add = group.add if tokens is None else tokens.add
        module.forward = partial(
            _rowwise_forward, module, add, group if style == "rowwise_split_input" else None
        )
    elif style == "embedding_rowwise":
        _split_vocabulary(module, group)
    elif style == "replicated_with_grad_allreduce":
        module.forward = partial(_forward_with_summed_gradients, module, group, module.forward)


def _gather_hook(group: ParallelGroup) -> Callable[..., Tensor]:
    return lambda _module, _inputs, output: group.gather(output)


def _rowwise_forward(
    module: Any, add: Callable[[Tensor], Tensor], splits_by: ParallelGroup | None, inputs: Tensor
) -> Tensor:
    part = splits_by.own_part(inputs) if splits_by else inputs
    total = add(_product(module, part))
    # The bias is added once, after the sum, and in the sum's dtype, as a linear layer
    # does under autocast.
    return total if module.bias is None else total + module.bias.to(total.dtype)


def _product(module: Any, inputs: Tensor) -> Tensor:
    """Return what a layer makes of its inputs, without its bias. One that computes it in another
    way has a method.
    """
    if hasattr(module, "product"):
        product: Tensor = module.product(inputs)
        return product
    return inputs @ module.weight if _is_conv1d(module) else F.linear(inputs, module.weight)


def _split_vocabulary(module: Any, group: ParallelGroup) -> None:
    """Have an embedding look up its own tokens only, with zero vectors for others, and sum
    the vectors over ranks.
    """
    count = module.num_embeddings // group.size
    first, foreign = group.rank * count, list[Tensor]()

    def select_own_tokens(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens = inputs[0] - first
        foreign[:] = [(tokens < 0) | (tokens >= count)]
        return tokens.masked_fill(foreign[0], 0), *inputs[1:]

    def sum_vectors(_module: nn.Module, _inputs: object, vectors: Tensor) -> Tensor:
        return group.add(vectors.masked_fill(foreign.pop().unsqueeze(-1), 0))

    padding = module.padding_idx
    module.padding_idx = (
        padding - first if padding is not None and first <= padding < first + count else None
    )
    module.num_embeddings = count
    module.register_forward_pre_hook(select_own_tokens)
    module.register_forward_hook(sum_vectors)


def _forward_with_summed_gradients(
    module: nn.Module, group: ParallelGroup, forward: Callable[..., Any], *inputs: Any
) -> Any:
    """Run ``forward`` with parameters whose gradients are summed over the ranks."""
    own: dict[str, Any] = dict(module._parameters)
    try:
        for name, parameter in own.items():
            if parameter is not None:
                module._parameters[name] = group.enter_alone(parameter)  # type: ignore[assignment]
        return forward(*inputs)
    finally:
        module._parameters.update(own)

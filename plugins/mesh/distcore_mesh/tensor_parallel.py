"""Tensor parallelism: ranks compute with parts of the weights, and collectives join the results.

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
from distcore_mesh.adapters import follow_dropouts
from distcore_mesh.context_parallel import SplitSequences
from distcore_mesh.loss_parallel import keep_split
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.sequence_parallel import split_tokens
from distcore_mesh.tensor_layout import TensorSplit
from distcore_mesh.tp_plans import GATHERED, TPPlan

log = logging.getLogger("distcore")
WHOLE_OUTPUT = ("embedding_rowwise", GATHERED, "rowwise_split_input")
"""Styles of modules with whole inputs and outputs, which can stay whole without other changes."""


def split_layers(
    model: nn.Module,
    plan: TPPlan,
    group: ParallelGroup,
    by_tokens: bool = False,
    splits_logits: bool = False,
) -> tuple[dict[str, TensorSplit], SplitSequences | None]:
    """Split the modules that the plan names, in place.

    Returns the split of each parameter, and that of sequences, if they are split. With
    ``by_tokens``, each rank has a part of every sequence between split layers. With
    ``splits_logits``, outputs that the plan gathers stay split for the loss. Raises StrategyError
    as ``styles_for`` does, and for a weight to be split whose gradient has a hook.
    """
    styles = styles_for(model, plan, group.size)
    splits = _splits_of_styles(model, styles)
    _refuse_hooks(model, splits)
    tokens = split_tokens(model, styles, splits, group) if by_tokens else None
    modules_of_blocks: set[int] = set()
    for block in repeated_blocks(model).values():
        modules_of_blocks.update(map(id, block.modules()))
    with torch.no_grad():
        for name, split in splits.items():
            parameter = model.get_parameter(name)
            # In place, so that every user of a tied weight has its part.
            parameter.data = split.part_of(parameter.data, group.rank, group.size)
    for name, style in styles.items():
        # The name of a "divided" is that of an attribute, not of a module.
        is_in_block = style != "divided" and id(model.get_submodule(name)) in modules_of_blocks
        # Embeddings and heads outside of the blocks see whole sequences.
        _split_module(model, name, style, group, tokens if is_in_block else None)
        if style == GATHERED:
            # The module is a head, unless it is inside a block.
            is_split_head = splits_logits and not is_in_block
            hook = keep_split(group) if is_split_head else _gather_hook(group)
            model.get_submodule(name).register_forward_hook(hook)
    follow_dropouts(model, styles, (group.rank, group.size))
    log.info("mesh: %d tensors are split over %d ranks by %s", len(splits), group.size, plan.source)
    return splits, tokens


def _refuse_hooks(model: nn.Module, splits: Iterable[str]) -> None:
    """Raise StrategyError for a split weight with a hook, written for the whole gradient."""
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
    """Return the split of each parameter of ``model`` over ``ranks`` ranks.

    ``model`` may be on the meta device. Raises StrategyError as ``styles_for`` does.
    """
    return _splits_of_styles(model, styles_for(model, plan, ranks))


def _select_split_modules(model: nn.Module, plan: TPPlan, ranks: int) -> dict[str, str]:
    """Return the plan's styles without the modules that stay whole, and log these.

    A module stays whole if its size does not divide, such as an odd vocabulary, or if the plan does
    not split all users of its weight alike. Raises StrategyError if such a module cannot stay
    whole.
    """
    whole: set[str] = set()
    for users in _users_of_weights(model):
        split_users = [name for name in users if plan.styles.get(name, "divided") != "divided"]
        if not split_users or _can_split_alike(model, plan, users, split_users, ranks):
            continue
        for name in split_users:
            # Other styles leave the next layer a part of the outputs, which it counts on.
            if plan.styles[name] not in WHOLE_OUTPUT:
                other = next(user for user in users if user != name)
                raise StrategyError(
                    f"{plan.source}: {name!r} shares its weight with"
                    f" {other!r}, which is not split alike"
                )
        whole |= set(split_users)
    if whole:
        names = ", ".join(sorted(whole))
        log.info("mesh: whole on every rank, though the plan names them: %s", names)
    return {name: style for name, style in plan.styles.items() if name not in whole}


def _users_of_weights(model: nn.Module) -> Iterable[list[str]]:
    """Return, for each parameter, the names of the modules that have it: several if it is tied."""
    users: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].append(name)
    return users.values()


def _can_split_alike(
    model: nn.Module,
    plan: TPPlan,
    users: list[str],
    split_users: list[str],
    ranks: int,
) -> bool:
    """Return True if the plan splits all ``users`` of a weight, along one dimension, evenly.

    A size that does not divide counts only for modules that can stay whole; ``_check_sizes``
    reports the others.
    """
    dimensions = set()
    for name in split_users:
        style = plan.styles[name]
        if style in WHOLE_OUTPUT and _is_uneven(model, name, style, ranks):
            return False
        dimensions.add(_dimension(model.get_submodule(name), style))
    return len(split_users) == len(users) and len(dimensions) == 1


def _is_uneven(model: nn.Module, name: str, style: str, ranks: int) -> bool:
    """Return True if ``ranks`` does not divide the size that a module's style splits."""
    module = model.get_submodule(name)
    size = _weight(module, name, style).shape[_dimension(module, style)]
    return size % ranks != 0


def _check_sizes(model: nn.Module, styles: dict[str, str], ranks: int) -> None:
    """Raise StrategyError unless ``ranks`` divides the number of heads and every split size."""
    sizes = _split_sizes(model, styles)
    for name, size in sizes.items():
        if size % ranks:
            common = gcd(*sizes.values())
            divisors = [number for number in range(1, common + 1) if common % number == 0]
            possible = ", ".join(map(str, divisors))
            raise StrategyError(
                f"strategy_options.tp = {ranks}: must divide {name} = {size} (possible: {possible})"
            )


def _split_sizes(model: nn.Module, styles: dict[str, str]) -> dict[str, int]:
    """Return each size that is split evenly over ranks, by the name that an error gives it."""
    sizes: dict[str, int] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for key in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(config, key, None)
            # Some configs have a list, one number a layer; the layers' own sizes are checked below.
            if isinstance(count, int):
                sizes[key] = count
    for name, style in styles.items():
        if style == "replicated_with_grad_allreduce":
            continue
        if style == "divided":
            path, _, attribute = name.rpartition(".")
            sizes[name] = getattr(model.get_submodule(path), attribute)
            continue
        module = model.get_submodule(name)
        dimension = _dimension(module, style)
        unit = 1
        if style == "qkv_colwise":
            unit = 3
        elif dimension == 1:
            # Columns of a block of 4-bit weights stay together.
            unit = getattr(module, "columns_together", 1)
        sizes[name] = _weight(module, name, style).shape[dimension] // unit
    return sizes


def _splits_of_styles(model: nn.Module, styles: dict[str, str]) -> dict[str, TensorSplit]:
    """Return the split of each parameter, by the parameter's first name in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    splits: dict[str, TensorSplit] = {}
    for name, style in styles.items():
        if style in ("divided", "replicated_with_grad_allreduce"):
            continue
        module = model.get_submodule(name)
        parts = 3 if style == "qkv_colwise" else 1
        weight = _weight(module, name, style)
        dimension = _dimension(module, style)
        splits[names[id(weight)]] = TensorSplit(dimension, parts, tuple(weight.shape))
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter) and "colwise" in style:
            splits[names[id(bias)]] = TensorSplit(0, parts, tuple(bias.shape))
    return splits


def _weight(module: nn.Module, name: str, style: str) -> nn.Parameter:
    """Return the weight of a module; raises StrategyError if its style cannot split the module."""
    weight = getattr(module, "weight", None)
    if style.startswith("embedding"):
        can_split = isinstance(module, nn.Embedding)
    else:
        # A subclass of Linear with another forward may use its weight in another way.
        is_plain_linear = type(module).forward is nn.Linear.forward
        can_split = is_plain_linear or _is_conv1d(module) or hasattr(module, "product")
    if not can_split or not isinstance(weight, nn.Parameter):
        raise StrategyError(
            f"strategy 'mesh': {name} is a {type(module).__name__}, which cannot be split {style!r}"
        )
    return weight


def _is_conv1d(module: nn.Module) -> bool:
    """Return True for transformers' ``Conv1D``: a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _dimension(module: nn.Module, style: str) -> int:
    """Return the dimension along which the weight is split."""
    styles_of_outputs = ("colwise", "qkv_colwise", "colwise_gather_output", "embedding_rowwise")
    dimension = 0 if style in styles_of_outputs else 1
    # The weight of a Conv1D is transposed.
    return 1 - dimension if _is_conv1d(module) else dimension


def _split_module(
    model: nn.Module, name: str, style: str, group: ParallelGroup, tokens: SplitSequences | None
) -> None:
    """Have one module compute with its part; ``tokens``: of sequences that are split, too."""
    if style == "divided":
        # A number of heads, for instance, by which a module's own code reshapes.
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        setattr(owner, attribute, getattr(owner, attribute) // group.size)
        return
    module: Any = model.get_submodule(name)
    if style in ("colwise", "qkv_colwise", "colwise_gather_output"):
        # With ``tokens``, the parent module has gathered them.
        if tokens is None:
            module.register_forward_pre_hook(_enter_hook(group))
        if _is_conv1d(module):
            module.nf //= group.size
        else:
            module.out_features //= group.size
    if style in ("rowwise", "rowwise_split_input"):
        add = group.add if tokens is None else tokens.add
        splits_by = group if style == "rowwise_split_input" else None
        module.forward = partial(_rowwise_forward, module, add, splits_by)
    elif style == "embedding_rowwise":
        _split_vocabulary(module, group)
    elif style == "replicated_with_grad_allreduce":
        module.forward = partial(_forward_with_summed_gradients, module, group, module.forward)


def _enter_hook(group: ParallelGroup) -> Callable[..., tuple[Any, ...]]:
    """Return a forward pre-hook that sums the gradients of the inputs over the ranks."""
    return lambda _module, inputs: (group.enter(inputs[0]), *inputs[1:])


def _gather_hook(group: ParallelGroup) -> Callable[..., Tensor]:
    """Return a forward hook that joins the outputs of all ranks."""
    return lambda _module, _inputs, output: group.gather(output)


def _rowwise_forward(
    module: Any, add: Callable[[Tensor], Tensor], splits_by: ParallelGroup | None, inputs: Tensor
) -> Tensor:
    """Return the output of a layer that takes some inputs, summed over the ranks by ``add``."""
    part = splits_by.own_part(inputs) if splits_by else inputs
    total = add(_product(module, part))
    if module.bias is None:
        return total
    # Once, after the sum, and in the sum's dtype, as a linear layer does under autocast.
    bias: Tensor = module.bias.to(total.dtype)
    return total + bias


def _product(module: Any, inputs: Tensor) -> Tensor:
    """Return the output of a layer without its bias."""
    # A layer of 4-bit weights has no matrix to multiply by.
    if hasattr(module, "product"):
        product: Tensor = module.product(inputs)
        return product
    if _is_conv1d(module):
        weight: Tensor = module.weight
        return inputs @ weight
    return F.linear(inputs, module.weight)


def _split_vocabulary(module: Any, group: ParallelGroup) -> None:
    """Have an embedding look up this rank's tokens only, and sum the vectors over ranks.

    The vectors of other ranks' tokens are zeros.
    """
    count = module.num_embeddings // group.size
    first = group.rank * count
    # At most one: the mask of other ranks' tokens, from one hook to the other.
    masks: list[Tensor] = []

    def select_own_tokens(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens = inputs[0] - first
        is_foreign = (tokens < 0) | (tokens >= count)
        masks[:] = [is_foreign]
        return tokens.masked_fill(is_foreign, 0), *inputs[1:]

    def sum_vectors(_module: nn.Module, _inputs: object, vectors: Tensor) -> Tensor:
        is_foreign = masks.pop().unsqueeze(-1)
        return group.add(vectors.masked_fill(is_foreign, 0))

    padding = module.padding_idx
    has_padding = padding is not None and first <= padding < first + count
    # Of another rank's padding token this rank has no row, which must get no gradient.
    module.padding_idx = padding - first if has_padding else None
    module.num_embeddings = count
    module.register_forward_pre_hook(select_own_tokens)
    module.register_forward_hook(sum_vectors)


def _forward_with_summed_gradients(
    module: nn.Module, group: ParallelGroup, forward: Callable[..., Any], *inputs: Any
) -> Any:
    """Run ``forward`` with parameters whose gradients are summed over the ranks."""
    parameters: dict[str, Any] = dict(module._parameters)
    try:
        for name, parameter in parameters.items():
            if parameter is not None:
                module._parameters[name] = group.enter_alone(parameter)  # type: ignore[assignment]
        return forward(*inputs)
    finally:
        # The optimizer and a checkpoint must see the module's own parameters.
        module._parameters.update(parameters)

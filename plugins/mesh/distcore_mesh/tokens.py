"""Sequence parallelism: between the split parts of a block each rank of a tensor-parallel group has its own tokens.

Norms, residuals and dropout, which every rank would compute alike, are computed for a part of every sequence. Before a
split part ranks gather the tokens; behind it the sum over ranks leaves each with its own (Korthikanti et al., 2022,
arXiv:2205.05198). It sends as much as the sums that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from distcore import StrategyError, repeated_blocks
from distcore_mesh.group import Group
from distcore_mesh.plans import model_type
from distcore_mesh.sequences import Sequences, leave_behind
from distcore_mesh.splits import Split

MODEL_TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2", "bert", "roberta", "electra", "distilbert", "vit",
)  # fmt: skip
"""Model types that are known to work so; all of these are tested."""
INSIDE = frozenset({"colwise", "qkv_colwise", "rowwise", "replicated_with_grad_allreduce", "divided"})
"""Styles whose modules may be in a block."""


def check_tokens(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise StrategyError, one line, unless blocks of ``model``, also a skeleton, can compute parts of sequences."""
    kind = model_type(model)
    if kind not in MODEL_TYPES:
        what = f"{type(model).__name__}{f' (model type {kind!r})' if kind else ''}"
        raise StrategyError(
            f"strategy_options.sequence_parallel: {what} is not known to compute parts of sequences (these are: "
            f"{', '.join(MODEL_TYPES)})"
        )
    inside = _names(model)
    if other := next((name for name, style in styles.items() if name in inside and style not in INSIDE), None):
        raise StrategyError(f"strategy_options.sequence_parallel: not with the style {styles[other]!r} of {other}")


def split_tokens(model: nn.Module, styles: Mapping[str, str], splits: Mapping[str, Split], group: Group) -> Sequences:
    """Have the blocks of ``model`` keep the tokens of this rank; layers inside them are split by ``styles`` afterwards.

    Raises StrategyError as ``check_tokens`` does.
    """
    check_tokens(model, styles)
    blocks, inside = list(repeated_blocks(model).values()), _names(model)
    alike = {
        name
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] in inside
        and name not in splits
        and styles.get(name.rpartition(".")[0]) != "replicated_with_grad_allreduce"
    }
    sequences = Sequences(group, frozenset(alike))
    begins = {name.rpartition(".")[0] for name in inside if styles.get(name) in ("colwise", "qkv_colwise")}
    for name in begins:
        model.get_submodule(name).register_forward_pre_hook(_changing(sequences.gather), with_kwargs=True)
    blocks[0].register_forward_pre_hook(_changing(sequences.enter), with_kwargs=True)
    leave_behind(blocks[-1], sequences)
    return sequences


def _names(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules in the blocks."""
    inside = {id(module) for block in repeated_blocks(model).values() for module in block.modules()}
    return frozenset(name for name, module in model.named_modules() if id(module) in inside)


def _changing(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a hook before a forward that changes the hidden state."""

    def before(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        return (), named | {"hidden_states": change(named["hidden_states"])}

    return before

"""Sequence parallelism: between a block's split parts, tensor-parallel ranks have own tokens.

Without it every rank computes the same norms, residuals and dropout. With it each rank computes
them for a part of every sequence. Before a split part, ranks gather the tokens; after it, a
reduce-scatter leaves each rank its own (Korthikanti et al., 2022, arXiv:2205.05198). The traffic
equals the traffic of the replaced all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from distcore import StrategyError
from distcore.model import repeated_blocks
from distcore_mesh.context_parallel import SplitSequences, gather_after
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.tensor_layout import TensorSplit
from distcore_mesh.tp_plans import model_type

MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt_neox",
    "gpt2",
    "bert",
    "roberta",
    "electra",
    "distilbert",
    "vit",
)
"""Model types whose blocks are known to work on a part of a sequence. All of them are tested."""
INSIDE = frozenset(
    {"colwise", "qkv_colwise", "rowwise", "replicated_with_grad_allreduce", "divided"}
)
"""Styles that modules inside a block may have."""


def check_tokens(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise StrategyError, one line, unless the blocks of ``model`` can compute parts of sequences.

    ``model`` may be on the meta device.
    """
    kind = model_type(model)
    if kind not in MODEL_TYPES:
        name = f"{type(model).__name__}{f' (model type {kind!r})' if kind else ''}"
        raise StrategyError(
            f"strategy_options.sequence_parallel: {name} is not known to compute parts of sequences"
            f" (these are: {', '.join(MODEL_TYPES)})"
        )
    inside = _names(model)
    for name, style in styles.items():
        if name in inside and style not in INSIDE:
            raise StrategyError(
                f"strategy_options.sequence_parallel: not with the style {style!r} of {name}"
            )


def split_tokens(
    model: nn.Module,
    styles: Mapping[str, str],
    splits: Mapping[str, TensorSplit],
    group: ParallelGroup,
) -> SplitSequences:
    """Have the blocks of ``model`` keep this rank's tokens only.

    Call it before ``styles`` split the layers inside. Raises StrategyError as ``check_tokens``
    does.
    """
    check_tokens(model, styles)
    blocks = list(repeated_blocks(model).values())
    inside = _names(model)
    # Parameters that ranks hold alike, whose gradients are of a rank's own tokens.
    alike: set[str] = set()
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        is_summed = styles.get(owner) == "replicated_with_grad_allreduce"
        if owner in inside and name not in splits and not is_summed:
            alike.add(name)
    sequences = SplitSequences(group, frozenset(alike))
    # A split part begins with the parent of the layers that take all tokens, which gathers once.
    column_layers = [name for name in inside if styles.get(name) in ("colwise", "qkv_colwise")]
    for name in {layer.rpartition(".")[0] for layer in column_layers}:
        hook = _hidden_state_hook(sequences.gather)
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    blocks[0].register_forward_pre_hook(_hidden_state_hook(sequences.enter), with_kwargs=True)
    gather_after(blocks[-1], sequences)
    return sequences


def _names(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules inside the blocks."""
    in_blocks: set[int] = set()
    for block in repeated_blocks(model).values():
        in_blocks.update(map(id, block.modules()))
    return frozenset(name for name, module in model.named_modules() if id(module) in in_blocks)


def _hidden_state_hook(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a forward pre-hook that changes the hidden state."""

    def before(
        _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        return (), named | {"hidden_states": change(named["hidden_states"])}

    return before

"""Compute an encoder's last layer for the first token of each row only, if the
head reads no others.

Other tokens matter there only as keys and values, so the rest of their computation is skipped.
Losses and gradients stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from distcore_tasks.padding_free.attention import attend
from distcore_tasks.padding_free.token_sequence import TokenSequence


def compute_first_only(encoder: nn.Module) -> Callable[[], None]:
    """Make the last layer of ``encoder`` compute the first token of each row only. Return a
    function that undoes it.

    ``encoder`` has a type of ``supported_models.ENCODERS``, and no head. Calls without a
    token sequence are unchanged.
    """
    is_distilled = getattr(encoder.config, "model_type", None) == "distilbert"
    *_, last = encoder.get_submodule(
        "transformer.layer" if is_distilled else "encoder.layer"
    ).children()
    compiled = vars(last).get("forward")
    # On the instance: other layers keep their class's forward.
    vars(last)["forward"] = MethodType(_distilbert if is_distilled else _bert, last)

    def undo() -> None:
        del vars(last)["forward"]
        if compiled:
            vars(last)["forward"] = compiled

    return undo


def _bert(
    layer: Any,
    hidden: Tensor,
    *given: Any,
    token_sequence: TokenSequence | None = None,
    **named: Any,
) -> Any:
    """Compute ``BertLayer``, or a copy of it, for the first tokens only."""
    if token_sequence is None:
        return type(layer).forward(layer, hidden, *given, **named)
    own, first = layer.attention.self, token_sequence.firsts(hidden)
    seen = _attend(own, token_sequence, own.query(first), own.key(hidden), own.value(hidden))
    return layer.feed_forward_chunk(layer.attention.output(seen, first))


def _distilbert(
    block: Any,
    hidden: Tensor,
    *given: Any,
    token_sequence: TokenSequence | None = None,
    **named: Any,
) -> Any:
    """Compute DistilBERT's ``TransformerBlock`` for the first tokens only."""
    if token_sequence is None:
        return type(block).forward(block, hidden, *given, **named)
    own, first = block.attention, token_sequence.firsts(hidden)
    seen = _attend(own, token_sequence, own.q_lin(first), own.k_lin(hidden), own.v_lin(hidden))
    normed = block.sa_layer_norm(own.out_lin(seen) + first)
    return block.output_layer_norm(block.ffn(normed) + normed)


def _attend(own: Any, sequence: TokenSequence, *states: Any) -> Tensor:
    """Compute the attention of first tokens, ``(1, rows, size)``. ``states``: their queries,
    all keys, all values.
    """
    query, key, value = (
        part.unflatten(-1, (-1, own.attention_head_size)).transpose(1, 2) for part in states
    )
    dropout = own.dropout.p if own.training else 0.0
    options: dict[str, Any] = {"dropout": dropout, "scaling": own.scaling, "is_causal": False}
    return attend(own, query, key, value, None, token_sequence=sequence, **options)[0].flatten(2)

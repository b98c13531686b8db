"""Compute an encoder's last layer for the first token of each row only.

This is for heads that read no other tokens.
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
    """Make the last layer of ``encoder`` compute the first token of each row only.

    Returns a function that undoes it.
    ``encoder`` has a type of ``supported_models.ENCODERS``, and no head. Calls without a
    token sequence are unchanged.
    """
    layers = "encoder.layer"
    forward: Callable[..., Any] = _bert
    if getattr(encoder.config, "model_type", None) == "distilbert":
        layers = "transformer.layer"
        forward = _distilbert
    *_, last = encoder.get_submodule(layers).children()
    compiled = vars(last).get("forward")
    # On the instance: other layers keep their class's forward.
    vars(last)["forward"] = MethodType(forward, last)

    def undo() -> None:
        del vars(last)["forward"]
        if compiled:
            vars(last)["forward"] = compiled

    return undo


def _bert(
    layer: Any,
    hidden: Tensor,
    *args: Any,
    token_sequence: TokenSequence | None = None,
    **kwargs: Any,
) -> Any:
    """Compute ``BertLayer``, or a copy of it, for the first tokens only."""
    if token_sequence is None:
        return type(layer).forward(layer, hidden, *args, **kwargs)
    attention = layer.attention.self
    first = token_sequence.firsts(hidden)
    query, key, value = attention.query(first), attention.key(hidden), attention.value(hidden)
    attended = _attend(attention, token_sequence, query, key, value)
    return layer.feed_forward_chunk(layer.attention.output(attended, first))


def _distilbert(
    block: Any,
    hidden: Tensor,
    *args: Any,
    token_sequence: TokenSequence | None = None,
    **kwargs: Any,
) -> Any:
    """Compute DistilBERT's ``TransformerBlock`` for the first tokens only."""
    if token_sequence is None:
        return type(block).forward(block, hidden, *args, **kwargs)
    attention = block.attention
    first = token_sequence.firsts(hidden)
    query, key, value = attention.q_lin(first), attention.k_lin(hidden), attention.v_lin(hidden)
    attended = _attend(attention, token_sequence, query, key, value)
    normed = block.sa_layer_norm(attention.out_lin(attended) + first)
    return block.output_layer_norm(block.ffn(normed) + normed)


def _attend(
    attention: Any,
    sequence: TokenSequence,
    query: Any,
    key: Any,
    value: Any,
) -> Tensor:
    """Compute the attention of first tokens, ``(1, rows, size)``.

    ``query`` has first tokens only; ``key`` and ``value`` have all of them.
    """
    head_size = attention.attention_head_size

    def split_heads(states: Any) -> Any:
        return states.unflatten(-1, (-1, head_size)).transpose(1, 2)

    query = split_heads(query)
    key = split_heads(key)
    value = split_heads(value)
    attended, _ = attend(
        attention,
        query,
        key,
        value,
        None,
        token_sequence=sequence,
        dropout=attention.dropout.p if attention.training else 0.0,
        scaling=attention.scaling,
        is_causal=False,
    )
    return attended.flatten(2)

"""The last layer of an encoder whose head reads the first token of each row: the others are not computed.

They are keys and values there, and nothing else that they would be has a part in the loss: losses and gradients are
the same without.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from distcore_tasks.packing.attention import attend
from distcore_tasks.packing.groups import Groups


def read_first(encoder: nn.Module) -> Callable[[], None]:
    """Have the last layer of ``encoder`` give the first token of each row where rows are packed; return the undoing.

    The encoder is that of one of ``kinds.ENCODERS``, without a head.
    """
    is_distilled = getattr(encoder.config, "model_type", None) == "distilbert"
    *_, last = encoder.get_submodule("transformer.layer" if is_distilled else "encoder.layer").children()
    vars(last)["forward"] = MethodType(_distilbert if is_distilled else _bert, last)

    def undo() -> None:
        del vars(last)["forward"]

    return undo


def _bert(layer: Any, hidden: Tensor, *given: Any, packed_rows: Groups | None = None, **named: Any) -> Any:
    """Compute as ``BertLayer`` and its copies do."""
    if packed_rows is None:
        return type(layer).forward(layer, hidden, *given, **named)
    own, first = layer.attention.self, packed_rows.firsts(hidden)
    seen = _attended(own, packed_rows, own.query(first), own.key(hidden), own.value(hidden))
    return layer.feed_forward_chunk(layer.attention.output(seen, first))


def _distilbert(block: Any, hidden: Tensor, *given: Any, packed_rows: Groups | None = None, **named: Any) -> Any:
    """Compute as ``TransformerBlock`` of DistilBERT does."""
    if packed_rows is None:
        return type(block).forward(block, hidden, *given, **named)
    own, first = block.attention, packed_rows.firsts(hidden)
    seen = _attended(own, packed_rows, own.q_lin(first), own.k_lin(hidden), own.v_lin(hidden))
    normed = block.sa_layer_norm(own.out_lin(seen) + first)
    return block.output_layer_norm(block.ffn(normed) + normed)


def _attended(own: Any, rows: Groups, *states: Any) -> Tensor:
    """Return what the first tokens see, ``(1, rows, size)``; ``states`` are theirs, and keys and values of all."""
    query, key, value = (part.unflatten(-1, (-1, own.attention_head_size)).transpose(1, 2) for part in states)
    dropout = own.dropout.p if own.training else 0.0
    options: dict[str, Any] = {"dropout": dropout, "scaling": own.scaling, "is_causal": False}
    return attend(own, query, key, value, None, packed_rows=rows, **options)[0].flatten(2)

"""Which models can do without padding, and how: hooks before and behind the layers of a model that has no head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from distcore import has_jagged_attention
from distcore_tasks.packing.attention import NAME, register
from distcore_tasks.packing.cls_only_last_layer import read_first
from distcore_tasks.packing.groups import Groups, groups_of
from distcore_tasks.packing.supported_models import DECODERS, FROM_PAD, RELATIVE, Read, gives_first


def unpad(model: nn.Module, *, read: Read = "any") -> Callable[[], None]:
    """Have the layers of a transformers ``model`` compute without padding; return what undoes that.

    The model is called as before, with padded rows and their mask. ``read`` says what its head reads of the layers:
    ``any``: each row is padded again, with zeros, so that first and last token are where they were; ``tokens``: single
    ones, so they come as ``(1, tokens, size)``, row by row; ``first``: the first of each row, so an encoder's last
    layer gives no others, ``(rows, 1, size)``. Calls without a mask, and those that go on from a cache, are padded.
    """
    from transformers import PreTrainedModel

    register()
    whole: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    kind, before = whole.config.model_type, whole.config._attn_implementation
    layers = _encoder(whole) if kind in RELATIVE else whole.base_model
    if read == "first" and not gives_first(whole.config.to_dict()):
        read = "any"
    whole.set_attn_implementation(NAME)

    def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any] | None:
        return _packed(kind, layers, given, named)

    def leave(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], found: Any) -> Any:
        return _unpacked(layers, named.get("packed_rows"), found, read)

    hooks = [
        layers.register_forward_pre_hook(enter, with_kwargs=True),
        layers.register_forward_hook(leave, with_kwargs=True),
    ]
    if kind in RELATIVE:
        biased = (module for module in layers.modules() if getattr(module, "has_relative_attention_bias", False))
        hooks += [module.register_forward_pre_hook(_bias, with_kwargs=True) for module in biased]

    whole_rows = read_first(layers) if read == "first" else None

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        if whole_rows:
            whole_rows()
        whole.set_attn_implementation(before)

    return undo


def of_tokens(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the logits of the tokens that ``mask``, ``(n, longest)``, has, row by row: ``(tokens, outputs)``.

    ``logits`` are ``(n, longest, outputs)`` or, where the model was told ``tokens``, ``(1, tokens, outputs)``.
    """
    return logits[mask.bool()] if logits.shape[:2] == mask.shape else logits[0]


def _encoder(whole: Any) -> nn.Module:
    """Return the encoder of a model that may have a decoder, too."""
    found: nn.Module = whole.get_encoder()
    return found


def _packed(
    kind: str, layers: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the inputs of the layers as one sequence; ``None``: leave them as they are."""
    inputs = dict(named)
    if given:
        inputs["input_ids"] = given[0]
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if len(given) > 1 or tokens is None or mask is None or mask.ndim != 2 or mask.shape != tokens.shape:
        return None
    if inputs.get("past_key_values") is not None:
        return None
    rows = groups_of(mask, at_once=kind not in RELATIVE and has_jagged_attention(mask.device) and _fits(layers.config))
    inputs["input_ids"] = rows.taken(tokens)
    if inputs.get("token_type_ids") is not None:
        inputs["token_type_ids"] = rows.taken(inputs["token_type_ids"])
    if kind not in RELATIVE:
        first = layers.config.pad_token_id + 1 if kind in FROM_PAD else 0  # type: ignore[union-attr, operator]
        inputs["position_ids"] = rows.offsets[None] + first
    if kind in DECODERS:
        inputs["use_cache"] = False
    # A mask of four dimensions is handed on as it is, and none of the size of all tokens, squared, is made.
    inputs["attention_mask"] = mask.new_ones(1, 1, 1, 1)
    return (), inputs | {"packed_rows": rows}


def _fits(config: Any) -> bool:
    """Return whether kernels for rows of unlike length take the size of an attention head."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size % 8 == 0


def _unpacked(layers: Any, rows: Groups | None, found: Any, read: Read) -> Any:
    """Return what the layers gave, as the head reads it."""
    if rows is None:
        return found
    hidden = found.last_hidden_state
    ways = {"any": rows.padded, "tokens": rows.in_order, "first": rows.by_row}
    found.last_hidden_state = ways[read](hidden)
    if getattr(layers, "pooler", None) is not None:
        found.pooler_output = layers.pooler(found.last_hidden_state)
    return found


def _bias(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give T5's first layer the bias of the longest row, instead of that of all tokens."""
    rows: Groups | None = named.get("packed_rows")
    if rows is None:
        return None
    longest = max(group.longest for group in rows.groups)
    return given, named | {"position_bias": module.compute_bias(longest, longest)}

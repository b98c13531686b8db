"""Join the rows of a micro-batch before a model's layers, and split them after, by module hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from sys import maxsize
from typing import Any

import torch
from torch import Tensor, nn

from distcore.distributed import has_jagged_attention
from distcore.model import current_masks
from distcore_tasks.padding_free.attention import SDPA, register
from distcore_tasks.padding_free.cls_only_last_layer import compute_first_only
from distcore_tasks.padding_free.supported_models import (
    DECODERS,
    FROM_PAD,
    RELATIVE,
    Read,
    gives_first,
)
from distcore_tasks.padding_free.token_sequence import TokenSequence, crossing_of, sequence_of
from distcore_tasks.shared.jagged import IGNORED

RECURRING = 64
"""Tokens of a sequence are a multiple of so many for products in low precision on a CPU.

oneDNN makes a kernel for each size, which takes longer than a product with it.
"""


def enable_padding_free(model: nn.Module, *, read: Read = "any") -> Callable[[], None]:
    """Make the layers of a transformers ``model`` compute without padding. Return a
    function that undoes it.

    The model is still called with padded rows and a mask, that of an encoder's decoder
    with ``labels``. ``read`` is the part of the layers' output that the head reads, and so the form
    of that output. ``any``: rows padded with
    zeros, each token in its place. ``tokens``: the tokens row by row, ``(1, tokens, size)``.
    ``first``: the first token of each row, ``(rows, 1, size)``; an encoder's last layer then
    computes no others. Calls without a mask, and calls with a cache, stay as they are.
    """
    from transformers import PreTrainedModel

    compiled = any("forward" in vars(module) for module in model.modules())
    whole: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    kind, before = whole.config.model_type, whole.config._attn_implementation
    stacks = _stacks(whole) if kind in RELATIVE else [whole.base_model]
    layers = stacks[0]
    if read == "first" and not gives_first(whole.config.to_dict()):
        read = "any"
    name = register(before, compiled)
    whole.set_attn_implementation(name)

    def enter(
        module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any] | None:
        return _as_sequence(kind, module, given, named)

    def leave(
        module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], outputs: Any
    ) -> Any:
        return _as_read(module, named.get("token_sequence"), outputs, read)

    hooks = [stack.register_forward_pre_hook(enter, with_kwargs=True) for stack in stacks]
    hooks += [stack.register_forward_hook(leave, with_kwargs=True) for stack in stacks]
    if kind in RELATIVE:
        in_first_layer = (
            part
            for stack in stacks
            for part in stack.modules()
            if getattr(part, "layer_idx", None) == 0
        )
        add_bias = torch.compiler.disable(_add_bias) if compiled else _add_bias  # type: ignore[no-untyped-call]
        hooks += [
            module.register_forward_pre_hook(add_bias, with_kwargs=True)
            for module in in_first_layer
        ]
    if len(stacks) > 1:  # before other hooks, which may take the labels out
        hooks += [
            whole.register_forward_pre_hook(_add_decoder_mask, prepend=True, with_kwargs=True)
        ]

    compute_all = compute_first_only(layers) if read == "first" else None

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        if compute_all:
            compute_all()
        whole.set_attn_implementation(before)

    return undo


def _stacks(whole: Any) -> list[nn.Module]:
    """Return the encoder of a model, and its decoder if it has one."""
    return [whole.get_encoder(), *([whole.decoder] if hasattr(whole, "decoder") else [])]


def _add_decoder_mask(
    whole: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], Any] | None:
    """Pass the decoder the mask that follows from labels."""
    labels = named.get("labels")
    if labels is None or named.get("decoder_attention_mask") is not None:
        return None
    return given, named | {"decoder_attention_mask": labels != IGNORED, "use_cache": False}


def _as_sequence(
    kind: str, layers: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the inputs of the layers as one sequence; ``None`` to leave them unchanged."""
    inputs = dict(named)
    if given:
        inputs["input_ids"] = given[0]
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if (
        len(given) > 1
        or tokens is None
        or mask is None
        or mask.ndim != 2
        or mask.shape != tokens.shape
    ):
        return None
    read: Tensor | None = inputs.get("encoder_hidden_states")
    read_mask: Any = inputs.get("encoder_attention_mask")
    if inputs.get("past_key_values") is not None or not (
        read is None or _can_cross(mask, read_mask)
    ):
        return None
    longest = _longest_at_once(kind, layers.config) if has_jagged_attention(mask.device) else 0
    multiple = RECURRING if _is_low_precision(layers, mask.device) else 1
    sequence = sequence_of(mask, longest, multiple)
    if read is not None:
        source = sequence_of(read_mask, longest, multiple)
        sequence = replace(sequence, crossing=crossing_of(sequence, source))
        inputs["encoder_hidden_states"] = source.taken(read)
        inputs["encoder_attention_mask"] = mask.new_ones(1, 1, 1, 1)
    if masks := current_masks():
        rows = sequence.rows.index_select(0, sequence.first)
        # for a layer that computes the first tokens only
        masks.set_places(rows, torch.zeros_like(rows))
        masks.set_places(sequence.rows, sequence.offsets)
    inputs["input_ids"] = sequence.taken(tokens)
    if inputs.get("token_type_ids") is not None:
        inputs["token_type_ids"] = sequence.taken(inputs["token_type_ids"])
    if kind not in RELATIVE:
        # By default positions would count through the joined rows; each row counts from its
        # own first token.
        first = layers.config.pad_token_id + 1 if kind in FROM_PAD else 0
        inputs["position_ids"] = sequence.offsets[None] + first
    if kind in DECODERS:
        inputs["use_cache"] = False  # it would be a cache of one long row
    # transformers passes a mask of four dimensions on unchanged. From others it would make one of
    # tokens x tokens.
    inputs["attention_mask"] = mask.new_ones(1, 1, 1, 1)
    return (), inputs | {"token_sequence": sequence}


def _can_cross(mask: Tensor, read_mask: Tensor | None) -> bool:
    """Return True if a decoder has tokens with this mask, and an encoder some in each row
    of the other one.
    """
    return (
        read_mask is not None
        and read_mask.ndim == 2
        and bool(mask.any() and read_mask.any(1).all())
    )


def _is_low_precision(layers: nn.Module, device: torch.device) -> bool:
    """Return True if a CPU multiplies in bf16 or fp16."""
    is_cast = (
        torch.is_autocast_enabled("cpu")
        or next(layers.parameters()).dtype.itemsize < torch.float32.itemsize
    )
    return device.type == "cpu" and is_cast


def _longest_at_once(kind: str, config: Any) -> int:
    """Return the tokens of the longest row that kernels for nested tensors can compute:
    they have no windows.

    They also have neither biases nor capped scores, and only some sizes of attention heads;
    then it is 0.
    """
    size: int = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    if kind in RELATIVE or config._attn_implementation != SDPA or size % 8:
        return 0
    return getattr(config, "sliding_window", None) or maxsize


def _as_read(layers: Any, sequence: TokenSequence | None, outputs: Any, read: Read) -> Any:
    """Return the outputs of the layers in the form that the head reads."""
    if sequence is None:
        return outputs
    if masks := current_masks():
        masks.set_places(
            sequence.in_order(sequence.rows[None])[0], sequence.in_order(sequence.offsets[None])[0]
        )
    hidden = outputs.last_hidden_state
    ways = {"any": sequence.padded, "tokens": sequence.in_order, "first": sequence.by_row}
    outputs.last_hidden_state = ways[read](hidden)
    if getattr(layers, "pooler", None) is not None:
        # The layers have pooled the first token of the joined sequence, which is that of
        # one row only.
        outputs.pooler_output = layers.pooler(outputs.last_hidden_state)
    return outputs


def _add_bias(
    module: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pass T5's first layer the position bias of the longest row. It would make one
    for all tokens otherwise.
    """
    sequence: TokenSequence | None = named.get("token_sequence")
    if sequence is None:
        return None
    # attention between decoder and encoder, which has none
    if not module.has_relative_attention_bias:
        return given, named | {"position_bias": named["key_value_states"].new_zeros(1, 1, 1, 1)}
    longest = max(group.longest for group in sequence.groups)
    return given, named | {"position_bias": module.compute_bias(longest, longest)}

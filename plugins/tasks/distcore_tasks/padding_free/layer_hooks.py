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
"""The number of a sequence's tokens is a multiple of it for low precision on a CPU.

oneDNN makes a kernel for each size, which takes longer than a product with it.
"""


def enable_padding_free(model: nn.Module, *, read: Read = "any") -> Callable[[], None]:
    """Make the layers of a transformers ``model`` compute without padding.

    Returns a function that undoes it. The model is still called with padded rows and a mask, an
    encoder-decoder also with ``labels``. Calls without a mask, and calls with a cache, stay as they
    are.

    ``read`` is the part of the layers' output that the head reads, and so the form of that output.
    ``any``: rows padded with zeros, each token in its place. ``tokens``: the tokens row by row,
    ``(1, tokens, size)``. ``first``: the first token of each row, ``(rows, 1, size)``; an encoder's
    last layer then computes no others.
    """
    from transformers import PreTrainedModel

    compiled = any("forward" in vars(module) for module in model.modules())
    whole: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    kind = whole.config.model_type
    attention_before = whole.config._attn_implementation
    stacks = _stacks(whole) if kind in RELATIVE else [whole.base_model]
    layers = stacks[0]
    if read == "first" and not gives_first(whole.config.to_dict()):
        read = "any"
    whole.set_attn_implementation(register(attention_before, compiled))

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any] | None:
        return _as_sequence(kind, module, args, kwargs)

    def leave(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        return _as_read(module, kwargs.get("token_sequence"), outputs, read)

    hooks = [stack.register_forward_pre_hook(enter, with_kwargs=True) for stack in stacks]
    hooks += [stack.register_forward_hook(leave, with_kwargs=True) for stack in stacks]
    if kind in RELATIVE:
        add_bias = torch.compiler.disable(_add_bias) if compiled else _add_bias  # type: ignore[no-untyped-call]
        for stack in stacks:
            for module in stack.modules():
                is_attention_of_first_layer = getattr(module, "layer_idx", None) == 0
                if is_attention_of_first_layer:
                    hooks.append(module.register_forward_pre_hook(add_bias, with_kwargs=True))
    if len(stacks) > 1:
        # First, because other hooks may take the labels out.
        hooks.append(
            whole.register_forward_pre_hook(_add_decoder_mask, prepend=True, with_kwargs=True)
        )

    compute_all = compute_first_only(layers) if read == "first" else None

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        if compute_all:
            compute_all()
        whole.set_attn_implementation(attention_before)

    return undo


def _stacks(whole: Any) -> list[nn.Module]:
    """Return the encoder of a model, and its decoder if it has one."""
    stacks = [whole.get_encoder()]
    if hasattr(whole, "decoder"):
        stacks.append(whole.decoder)
    return stacks


def _add_decoder_mask(
    whole: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], Any] | None:
    """Pass the decoder the mask that follows from labels."""
    labels = kwargs.get("labels")
    if labels is None or kwargs.get("decoder_attention_mask") is not None:
        return None
    return args, kwargs | {"decoder_attention_mask": labels != IGNORED, "use_cache": False}


def _as_sequence(
    kind: str, layers: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the inputs of the layers as one sequence; ``None`` to leave them unchanged."""
    if len(args) > 1:
        return None
    inputs = dict(kwargs)
    if args:
        inputs["input_ids"] = args[0]
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if tokens is None or mask is None or mask.ndim != 2 or mask.shape != tokens.shape:
        return None
    if inputs.get("past_key_values") is not None:
        return None
    # Of a decoder that attends to an encoder: the encoder's output, and its mask.
    encoded: Tensor | None = inputs.get("encoder_hidden_states")
    encoder_mask: Any = inputs.get("encoder_attention_mask")
    if encoded is not None and not _can_cross(mask, encoder_mask):
        return None
    longest = _longest_at_once(kind, layers.config) if has_jagged_attention(mask.device) else 0
    multiple = RECURRING if _is_low_precision(layers, mask.device) else 1
    sequence = sequence_of(mask, longest, multiple)
    if encoded is not None:
        source = sequence_of(encoder_mask, longest, multiple)
        sequence = replace(sequence, crossing=crossing_of(sequence, source))
        inputs["encoder_hidden_states"] = source.taken(encoded)
        inputs["encoder_attention_mask"] = mask.new_ones(1, 1, 1, 1)
    if masks := current_masks():
        # For a layer that computes the first tokens only.
        rows = sequence.rows.index_select(0, sequence.first)
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


def _can_cross(mask: Tensor, encoder_mask: Tensor | None) -> bool:
    """Return True if a decoder with ``mask`` has tokens, and its encoder some in each row."""
    if encoder_mask is None or encoder_mask.ndim != 2:
        return False
    return bool(mask.any() and encoder_mask.any(1).all())


def _is_low_precision(layers: nn.Module, device: torch.device) -> bool:
    """Return True if a CPU multiplies in bf16 or fp16."""
    if device.type != "cpu":
        return False
    dtype = next(layers.parameters()).dtype
    return torch.is_autocast_enabled("cpu") or dtype.itemsize < torch.float32.itemsize


def _longest_at_once(kind: str, config: Any) -> int:
    """Return the tokens of the longest row that kernels for nested tensors can compute.

    These kernels have no windows, so a row must fit into one. They also have neither biases nor
    capped scores, and only some sizes of attention heads: for such models it is 0.
    """
    declared_size = getattr(config, "head_dim", None)
    head_size: int = declared_size or config.hidden_size // config.num_attention_heads
    if kind in RELATIVE or config._attn_implementation != SDPA or head_size % 8:
        return 0
    return getattr(config, "sliding_window", None) or maxsize


def _as_read(layers: Any, sequence: TokenSequence | None, outputs: Any, read: Read) -> Any:
    """Return the outputs of the layers in the form that the head reads."""
    if sequence is None:
        return outputs
    if masks := current_masks():
        rows = sequence.in_order(sequence.rows[None])[0]
        offsets = sequence.in_order(sequence.offsets[None])[0]
        masks.set_places(rows, offsets)
    forms = {"any": sequence.padded, "tokens": sequence.in_order, "first": sequence.by_row}
    outputs.last_hidden_state = forms[read](outputs.last_hidden_state)
    if getattr(layers, "pooler", None) is not None:
        # The layers have pooled the joined sequence's first token, which is that of one row only.
        outputs.pooler_output = layers.pooler(outputs.last_hidden_state)
    return outputs


def _add_bias(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pass T5's first layer the position bias of the longest row.

    Otherwise it would make one for all tokens.
    """
    sequence: TokenSequence | None = kwargs.get("token_sequence")
    if sequence is None:
        return None
    if module.has_relative_attention_bias:
        longest = max(group.longest for group in sequence.groups)
        bias = module.compute_bias(longest, longest)
    else:  # attention between decoder and encoder, which has none
        bias = kwargs["key_value_states"].new_zeros(1, 1, 1, 1)
    return args, kwargs | {"position_bias": bias}

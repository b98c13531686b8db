"""Causal language models: built-in GPT-2 and Llama shapes with random weights, local folders, models of the hub."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from distcore import ConfigError, ModelError
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.shapes import SHAPES, Shape
from distcore_tasks.shared import pretrained
from distcore_tasks.shared.pretrained import load_model, read_config, set_dropout

if TYPE_CHECKING:
    from torch import nn


POSITIONS = 1024
"""Positions of a built-in model, as in GPT-2; more for longer rows."""
PACKED = ("gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "gemma", "olmo2", "smollm3")
"""Model types for which a packed row is known to be what it is alone: a test builds each of them."""
PACKING_SINCE = (4, 53)
"""The first transformers that finds the borders of packed rows in their positions."""


def packs(options: CausalOptions, padding_free: str) -> bool:
    """Return whether rows of a micro-batch share a sequence; raises ModelError where that would not be exact.

    ``padding_free`` is that of the config: off, it turns packing off; else it decides where ``packing`` is 'auto'.
    Raises ConfigError if packing is off and ``split_documents`` or ``padding_free`` needs it.
    """
    if padding_free == "on" and options.packing == "off":
        raise ConfigError("padding_free = 'on': task_options.packing = 'off' pads rows; leave one of them out")
    packing = padding_free if options.packing == "auto" or padding_free == "off" else options.packing
    if packing == "off":
        if options.split_documents:
            raise ConfigError("packing = 'off': task_options.split_documents needs it; use --packing auto")
        return False
    kind = _model_type(options)
    found = tuple(int(part) for part in version("transformers").split(".")[:2])
    if kind not in PACKED:
        reason = f"{kind} is none of {', '.join(PACKED)}"
    elif found < PACKING_SINCE:
        reason = f"transformers {version('transformers')} has no packed rows; install 4.53 or newer"
    else:
        return True
    split = "task_options.split_documents = true" if options.split_documents else None
    wanted = "packing = 'on'" if packing == "on" else split
    if wanted:
        raise ModelError(f"{wanted}: model {options.model}: not known to be exact: {reason}")
    return False


def positions(options: CausalOptions) -> int | None:
    """Return for how many tokens the model has positions; ``None`` if nothing bounds them."""
    if options.from_scratch:
        return max(POSITIONS, options.max_seq_len + options.max_new_tokens)
    return pretrained.positions(options.model, options.model_folder())


def build_model(options: CausalOptions, *, vocab_size: int, pad: int, end: int | None) -> nn.Module:
    """Return the configured model in fp32; under torch's meta device it has no weights, and none are read.

    ``vocab_size`` is the tokenizer's, ``pad`` its padding token, ``end`` the token that ends an answer, if it has one.
    A pretrained model keeps the vocabulary of its weights. Raises ModelError.
    """
    # Packed rows have no mask, and need none; transformers takes the token that fills up a sequence for a mistake.
    logging.getLogger("transformers.modeling_utils").addFilter(_is_shown)
    shape = SHAPES.get(options.model)
    if shape is None:
        folder = options.model_folder()
        return load_model("AutoModelForCausalLM", options.model, folder, options.dropout, pad_token_id=pad)
    config = _config(shape, options, vocab_size, pad, end)
    set_dropout(config, options.dropout)
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model: nn.Module = auto.from_config(config)
    return model


def _is_shown(record: logging.LogRecord) -> bool:
    """Whether a message of transformers is to be shown: all but the one that recommends an attention mask."""
    return "We strongly recommend passing in an `attention_mask`" not in str(record.msg)


def _config(shape: Shape, options: CausalOptions, vocab_size: int, pad: int, end: int | None) -> Any:
    places = positions(options)
    tokens = {"vocab_size": vocab_size, "pad_token_id": pad, "bos_token_id": None, "eos_token_id": end}
    if shape.family == "gpt2":
        from transformers import GPT2Config

        gpt2: Any = GPT2Config
        return gpt2(n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads, n_positions=places, **tokens)
    from transformers import LlamaConfig

    llama: Any = LlamaConfig
    return llama(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=-(-8 * shape.hidden // (3 * 64)) * 64,  # 8/3 of the hidden size, up to a multiple of 64
        max_position_embeddings=places,
        tie_word_embeddings=True,
        **tokens,
    )


def _model_type(options: CausalOptions) -> str:
    if built_in := SHAPES.get(options.model):
        return built_in.family
    return str(read_config(options.model, options.model_folder())["model_type"])

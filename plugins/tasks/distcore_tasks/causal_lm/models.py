"""Causal language models: built-in GPT-2, Llama and Mixtral with random weights, local
folders and hub models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.shapes import SHAPES, Shape
from distcore_tasks.shared import pretrained
from distcore_tasks.shared.generation.settings import add_ends
from distcore_tasks.shared.pretrained import load_model, set_dropout

if TYPE_CHECKING:
    from torch import nn


POSITIONS = 1024
"""Positions of a built-in model, as in GPT-2; longer rows raise the number."""


def positions(options: CausalOptions) -> int | None:
    """Return the maximum number of positions of the model; ``None`` if it is unbounded."""
    if options.from_scratch:
        return max(POSITIONS, options.max_seq_len + options.max_new_tokens)
    return pretrained.positions(options.model, options.model_folder())


def build_model(
    options: CausalOptions,
    *,
    vocab_size: int,
    pad: int,
    end: int | None,
    answer_ends: Sequence[int] = (),
) -> nn.Module:
    """Return the configured model in fp32. Under torch's meta device, no weights are read.

    ``vocab_size``: that of the tokenizer. ``pad`` and ``end``: its padding and end tokens.
    ``answer_ends``: tokens with which the chat template ends an answer. A pretrained model keeps
    the vocabulary of its weights. Raises ModelError.
    """
    shape = SHAPES.get(options.model)
    if shape is None:
        folder = options.model_folder()
        loaded = load_model(
            "AutoModelForCausalLM", options.model, folder, options.dropout, pad_token_id=pad
        )
        ends = [*answer_ends] if end is None else [*answer_ends, end]
        add_ends(loaded, [*dict.fromkeys(ends)])
        return loaded
    config = causal_config(shape, options, vocab_size, pad, end)
    set_dropout(config, options.dropout)
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model: nn.Module = auto.from_config(config)
    return model


def causal_config(
    shape: Shape, options: CausalOptions, vocab_size: int, pad: int, end: int | None
) -> Any:
    """Return transformers' config of a built-in model; for the arguments see ``build_model``."""
    max_positions = positions(options)
    tokens = {
        "vocab_size": vocab_size,
        "pad_token_id": pad,
        "bos_token_id": None,
        "eos_token_id": end,
    }
    if shape.family == "gpt2":
        from transformers import GPT2Config

        gpt2: Any = GPT2Config
        return gpt2(
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_positions=max_positions,
            **tokens,
        )
    from transformers import LlamaConfig, MixtralConfig

    make: Any = LlamaConfig if shape.family == "llama" else MixtralConfig
    experts = {"num_local_experts": shape.experts, "num_experts_per_tok": 2, "sliding_window": None}
    return make(
        **(experts if shape.experts else {}),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        # 8/3 of the hidden size, up to a multiple of 64
        intermediate_size=-(-8 * shape.hidden // (3 * 64)) * 64,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        **tokens,
    )

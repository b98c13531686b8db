"""Encoder-decoder models: built-in T5s with random weights, local folders and hub models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distcore import ModelError
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.seq2seq.shapes import SHAPES
from distcore_tasks.shared.pretrained import check_kind, check_length, load_model, set_dropout

if TYPE_CHECKING:
    from torch import nn


def check_model(options: Seq2SeqOptions) -> None:
    """Raise ModelError if the model is no sequence-to-sequence model, ConfigError for more tokens than it takes."""
    if options.from_scratch:
        return
    folder = options.model_folder()
    refusal = "does not write a text for one that it has read; take a model such as T5 or BART"
    config = check_kind(options.model, folder, "SEQ_TO_SEQ_CAUSAL_LM", refusal)
    if getattr(config, "decoder_start_token_id", None) is None:
        problem = "config.json has no decoder_start_token_id, the first token of each output"
        raise ModelError(f"model {options.model}: {problem}; set it as the model was trained")
    check_length(options.model, folder, options.max_seq_len)
    check_length(options.model, folder, options.max_target_len, "max_target_len")
    check_length(options.model, folder, options.max_new_tokens, "max_new_tokens")


def build_model(options: Seq2SeqOptions, *, vocab_size: int, pad: int, end: int | None) -> nn.Module:
    """Return the configured model in fp32. Under torch's meta device, no weights are read.

    ``vocab_size``: that of the tokenizer. ``pad`` and ``end``: its padding and end tokens. A pretrained model keeps the
    vocabulary of its weights. Raises ModelError.
    """
    shape = SHAPES.get(options.model)
    if shape is None:
        # LayerDrop is off, because ranks that share a layer's weights would have to agree on each skip.
        whole = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
        folder = options.model_folder()
        return load_model("AutoModelForSeq2SeqLM", options.model, folder, options.dropout, **whole)
    from transformers import T5Config, T5ForConditionalGeneration

    t5: Any = T5Config
    config = t5(
        vocab_size=vocab_size,
        d_model=shape.hidden,
        d_kv=64,
        d_ff=4 * shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.hidden // 64,
        pad_token_id=pad,
        eos_token_id=end,
        decoder_start_token_id=pad,
    )
    set_dropout(config, options.dropout)
    model: nn.Module = T5ForConditionalGeneration(config)
    return model

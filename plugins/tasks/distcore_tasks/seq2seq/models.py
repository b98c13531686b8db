"""Encoder-decoder models: built-in T5s with random weights, local folders and hub models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import ModelError
from distcore_tasks.seq2seq.languages import WRAPPING, begin_in_language
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.seq2seq.shapes import SHAPES
from distcore_tasks.shared.generation.settings import change_settings
from distcore_tasks.shared.pretrained import (
    check_kind,
    check_length,
    load_model,
    read_config,
    set_dropout,
)

if TYPE_CHECKING:
    from torch import nn


def check_model(options: Seq2SeqOptions) -> None:
    """Raise ModelError if the model is no sequence-to-sequence model, ConfigError for more
    tokens than it takes.
    """
    if options.from_scratch:
        return
    folder = options.model_folder()
    refusal = "does not write a text for one that it has read; take a model such as T5 or BART"
    config = check_kind(options.model, folder, "SEQ_TO_SEQ_CAUSAL_LM", refusal)
    if (
        getattr(config, "decoder_start_token_id", None) is None
        and config.model_type not in WRAPPING
    ):
        problem = "config.json has no decoder_start_token_id, the first token of each output"
        raise ModelError(f"model {options.model}: {problem}; set it as the model was trained")
    check_length(options.model, folder, options.max_seq_len)
    check_length(options.model, folder, options.max_target_len, "max_target_len")
    check_length(options.model, folder, options.max_new_tokens, "max_new_tokens")


def check_capacity(options: Seq2SeqOptions, global_batch_size: int) -> None:
    """Raise ModelError for experts that leave out tokens of a micro-batch beyond a number of them.

    The loss of a step would depend on how it is cut. transformers also takes the number of the last
    evaluation for the training that follows.
    """
    if options.from_scratch:
        return
    config = read_config(options.model, options.model_folder())
    if config["model_type"] != "nllb-moe":
        return
    most_tokens = global_batch_size * max(
        options.max_seq_len, options.max_target_len, options.max_new_tokens
    )
    capacity = config.get("expert_capacity", 64)
    fraction = config.get("moe_eval_capacity_token_fraction", 1.0)
    if capacity is not None and capacity >= most_tokens and fraction <= 0:
        return
    problem = (
        "an expert leaves out the tokens of a micro-batch beyond them, so the loss would depend on"
        " its rows"
    )
    remedy = f"set expert_capacity to {most_tokens}, the tokens of a global batch, or more"
    raise ModelError(
        f"model {options.model}: config.json: expert_capacity = {capacity},"
        f" moe_eval_capacity_token_fraction = {fraction}: {problem}; {remedy}, and"
        " moe_eval_capacity_token_fraction to -1"
    )


def build_model(
    options: Seq2SeqOptions,
    *,
    vocab_size: int,
    pad: int,
    end: int | None,
    tokenizer: Path | None = None,
) -> nn.Module:
    """Return the configured model in fp32. Under torch's meta device, no weights are read.

    ``vocab_size``: that of the tokenizer. ``pad`` and ``end``: its padding and end tokens.
    ``tokenizer``: its folder, which says in which language a multilingual model writes. A
    pretrained model keeps the vocabulary of its weights. Raises ModelError.
    """
    shape = SHAPES.get(options.model)
    if shape is None:
        # LayerDrop is off, because ranks that share a layer's weights would have to agree
        # on each skip.
        whole = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
        folder = options.model_folder()
        loaded = load_model(
            "AutoModelForSeq2SeqLM", options.model, folder, options.dropout, **whole
        )
        _complete(loaded, pad)
        if tokenizer is not None:
            begin_in_language(loaded, tokenizer)
        return loaded
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


def _complete(model: nn.Module, pad: int) -> None:
    """Give a model what its folder leaves out, and its training or its texts need.

    Configs that are joined of an encoder's and a decoder's have the first token of a text, but
    transformers does not take it over into the generation config, and may have no padding token.
    """
    owner: Any = model
    if owner.config.pad_token_id is None:
        owner.config.pad_token_id = pad
    start = getattr(owner.config, "decoder_start_token_id", None)
    if getattr(owner.generation_config, "decoder_start_token_id", start) is None:
        change_settings(model, {"decoder_start_token_id": start})

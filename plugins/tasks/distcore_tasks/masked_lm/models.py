"""Masked language models: built-in BERTs with random weights, local folders and hub models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distcore import ModelError
from distcore_tasks.masked_lm.options import MaskedOptions
from distcore_tasks.shared.bert import SHAPES, bert_config
from distcore_tasks.shared.pretrained import load_model

if TYPE_CHECKING:
    from torch import nn


def mask_token(name: str, tokenizer: Any) -> int:
    """Return the mask token. Raises ModelError if the tokenizer has none."""
    if tokenizer.mask_token_id is None:
        raise ModelError(
            f"model {name}: its tokenizer has no mask token, so nothing can be masked; take another"
            " model"
        )
    return int(tokenizer.mask_token_id)


def build_model(options: MaskedOptions, *, vocab_size: int, pad: int) -> nn.Module:
    """Return the configured model in fp32. Under torch's meta device, no weights are read.

    ``vocab_size``: that of the tokenizer. ``pad``: its padding token. A pretrained model keeps the
    vocabulary of its weights. Raises ModelError.
    """
    shape = SHAPES.get(options.model)
    if shape is None:
        return load_model(
            "AutoModelForMaskedLM", options.model, options.model_folder(), options.dropout
        )
    from transformers import BertForMaskedLM

    length, dropout = options.max_seq_len, options.dropout
    config = bert_config(
        shape, vocab_size=vocab_size, max_seq_len=length, dropout=dropout, pad_token_id=pad
    )
    model: nn.Module = BertForMaskedLM(config)
    return model

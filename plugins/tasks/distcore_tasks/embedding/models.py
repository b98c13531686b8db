"""Encoders: built-in BERTs with random weights, local folders and hub models,
also those of sentence-transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distcore import ConfigError, ModelError
from distcore_tasks.embedding.modules import check_modules
from distcore_tasks.embedding.options import EmbeddingOptions
from distcore_tasks.shared.bert import SHAPES, bert_config, check_encoder, hidden_size
from distcore_tasks.shared.pretrained import load_model, read_config

if TYPE_CHECKING:
    from torch import nn

NO_ENCODER = "is not an encoder"


def build_encoder(options: EmbeddingOptions, *, vocab_size: int, pad: int) -> nn.Module:
    """Return the configured encoder in fp32, without a head.

    Under torch's meta device, no weights are read.

    ``vocab_size`` and ``pad``, the padding token, come from the tokenizer. Raises ModelError.
    """
    length, dropout, shape = options.length, options.dropout, SHAPES.get(options.model)
    if shape is None:
        model: Any = load_model("AutoModel", options.model, options.model_folder(), dropout)
    else:
        from transformers import BertModel

        model = BertModel(
            bert_config(
                shape, vocab_size=vocab_size, max_seq_len=length, dropout=dropout, pad_token_id=pad
            )
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # embeddings do not read it, so it would get no gradient
    whole: nn.Module = model
    return whole


def check_model(options: EmbeddingOptions) -> None:
    """Raise ModelError or ConfigError, one line, unless the model is an encoder
    that the options fit.
    """
    check_encoder(options, options.length, "MASKED_LM", NO_ENCODER)
    if not options.from_scratch and read_config(options.model, options.model_folder()).get(
        "is_encoder_decoder"
    ):
        raise ModelError(
            f"model {options.model}: {NO_ENCODER}, but an encoder with a decoder; take a model such"
            " as BERT or RoBERTa"
        )
    size = hidden_size(options)
    if isinstance(size, int) and max(options.dims, default=1) > size:
        raise ConfigError(
            f"dims = {list(options.dims)}: an embedding of {options.model} has {size} numbers; use"
            f" at most {size}"
        )
    if not options.from_scratch:
        check_modules(options.model, options.model_folder())
    _ = options.pools  # so that it raises before the data are read

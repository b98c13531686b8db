"""Token classifiers: built-in BERTs with random weights, local folders and hub models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distcore_tasks.shared.bert import SHAPES, bert_config
from distcore_tasks.shared.pretrained import class_fields, load_model
from distcore_tasks.token_classification.options import TagOptions

if TYPE_CHECKING:
    from torch import nn


def build_model(
    options: TagOptions, classes: Sequence[str], *, vocab_size: int, pad: int
) -> nn.Module:
    """Return the configured model in fp32, with a head for ``classes``; under torch's
    meta device without weights.

    ``vocab_size`` is the tokenizer's, ``pad`` its padding token; a pretrained model keeps the
    vocabulary of its weights. Raises ModelError.
    """
    fields = class_fields(classes) | {"pad_token_id": pad}
    shape = SHAPES.get(options.model)
    if shape is None:
        folder = options.model_folder()
        return load_model(
            "AutoModelForTokenClassification", options.model, folder, options.dropout, **fields
        )
    from transformers import BertForTokenClassification

    length, dropout = options.max_seq_len, options.dropout
    config = bert_config(
        shape, vocab_size=vocab_size, max_seq_len=length, dropout=dropout, **fields
    )
    model: nn.Module = BertForTokenClassification(config)
    return model

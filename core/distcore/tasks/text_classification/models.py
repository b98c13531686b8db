"""Classification models: built-in BERTs with random weights, local Hugging Face folders, models of the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore.tasks import pretrained
from distcore.tasks.pretrained import class_fields, load_model, set_dropout
from distcore.tasks.text_classification.options import TextOptions

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class BertShape:
    """Size of a BERT. Attention heads are 64 wide, and the feed-forward layer is four times the hidden size."""

    layers: int
    """Transformer layers."""
    hidden: int
    """Hidden size, a multiple of 64."""
    lr: float
    """Peak learning rate from random weights. At 5e-4 bert-small does not learn; the larger models use its rate."""


BUILT_IN_MODELS = {
    "bert-tiny": BertShape(2, 128, 5e-4),
    "bert-mini": BertShape(4, 256, 5e-4),
    "bert-small": BertShape(4, 512, 1e-4),
    "bert-medium": BertShape(8, 512, 1e-4),
    "bert-base": BertShape(12, 768, 1e-4),
}
"""The built-in models, by the name that follows ``--model``."""
PRETRAINED_LR = 3e-5
"""Peak learning rate for fine-tuning pretrained weights."""


def from_scratch(options: TextOptions) -> bool:
    """True for a built-in model, which starts from random weights and trains its own tokenizer."""
    return options.model in BUILT_IN_MODELS


def suggested_lr(name: str) -> float:
    """Return the peak learning rate to use for the model where the config says ``auto``."""
    built_in = BUILT_IN_MODELS.get(name)
    return built_in.lr if built_in else PRETRAINED_LR


def model_folder(name: str) -> Path:
    """Return the local folder of a model that is not built in; raises ModelError, one line."""
    return pretrained.model_folder(name, BUILT_IN_MODELS)


def build_classifier(options: TextOptions, classes: Sequence[str], *, vocab_size: int, pad_token: int) -> nn.Module:
    """Return the configured model in fp32, with a classification head for ``classes``.

    Under torch's meta device it has no weights, and none are read. ``vocab_size`` and ``pad_token`` are the
    tokenizer's; a pretrained model keeps the vocabulary size of its weights. Raises ModelError.
    """
    fields = class_fields(classes) | {"pad_token_id": pad_token}
    built_in = BUILT_IN_MODELS.get(options.model)
    if built_in is not None:
        return _build_from_scratch(built_in, options, vocab_size, fields)
    folder = model_folder(options.model)
    return load_model("AutoModelForSequenceClassification", options.model, folder, options.dropout, **fields)


def _build_from_scratch(
    built_in: BertShape, options: TextOptions, vocab_size: int, fields: dict[str, Any]
) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    shape = BertConfig(
        vocab_size=vocab_size,
        hidden_size=built_in.hidden,
        num_hidden_layers=built_in.layers,
        num_attention_heads=built_in.hidden // 64,
        intermediate_size=4 * built_in.hidden,
        max_position_embeddings=max(512, options.max_seq_len),  # 512 as in BERT, more for longer rows
        **fields,
    )
    set_dropout(shape, options.dropout)
    model: nn.Module = BertForSequenceClassification(shape)
    return model

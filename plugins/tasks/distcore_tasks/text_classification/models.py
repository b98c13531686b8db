"""Classification models: built-in BERTs with random weights, local folders and hub models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distcore_tasks.shared.bert import SHAPES, bert_config
from distcore_tasks.shared.pretrained import class_fields, load_model
from distcore_tasks.text_classification.options import TextOptions

if TYPE_CHECKING:
    from torch import nn

PROBLEM_TYPES = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
"""Map each ``problem_type`` to its name in transformers' configs."""


def build_classifier(
    options: TextOptions, classes: Sequence[str], *, vocab_size: int, pad: int
) -> nn.Module:
    """Return the configured model in fp32, with one output per class;
    without ``classes``, one output.

    No weights are read under torch's meta device. ``vocab_size`` and ``pad``, the padding token,
    come from the tokenizer. A pretrained model keeps the vocabulary of its weights. Raises
    ModelError.
    """
    outputs = classes or ["LABEL_0"]  # transformers' name for the output of a regression
    fields = class_fields(outputs) | {
        "pad_token_id": pad,
        "problem_type": PROBLEM_TYPES[options.problem_type],
    }
    shape = SHAPES.get(options.model)
    if shape is None:
        folder = options.model_folder()
        return load_model(
            "AutoModelForSequenceClassification", options.model, folder, options.dropout, **fields
        )
    from transformers import BertForSequenceClassification

    length, dropout = options.max_seq_len, options.dropout
    model: nn.Module = BertForSequenceClassification(
        bert_config(shape, vocab_size=vocab_size, max_seq_len=length, dropout=dropout, **fields)
    )
    return model

"""Reward models: built-in GPT-2 and Llama with random weights, local folders and hub
models, with one output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distcore_tasks.causal_lm.models import causal_config
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.reward_model.options import RewardOptions
from distcore_tasks.shared.pretrained import class_fields, load_model, set_dropout

if TYPE_CHECKING:
    from torch import nn


def build_reward_model(
    options: RewardOptions, *, vocab_size: int, pad: int, end: int | None
) -> nn.Module:
    """Return the configured model in fp32; its output is the last token's. No weights are read
    on the meta device.

    ``vocab_size``, ``pad`` and ``end``, the padding and end tokens, are the tokenizer's. A
    pretrained model keeps the vocabulary of its weights. Raises ModelError.
    """
    fields = class_fields(["reward"]) | {"pad_token_id": pad}
    shape = SHAPES.get(options.model)
    if shape is None:
        folder = options.model_folder()
        return load_model(
            "AutoModelForSequenceClassification", options.model, folder, options.dropout, **fields
        )
    config = causal_config(shape, options.as_causal(), vocab_size, pad, end)
    config.update(fields)
    set_dropout(config, options.dropout)
    from transformers import AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification
    model: nn.Module = auto.from_config(config)
    return model

"""Built-in encoder models: BERTs with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.padding import check_padding
from distcore_tasks.shared.pretrained import check_kind, check_length, read_config, set_dropout


@dataclass(frozen=True, slots=True)
class BertShape:
    """Size of a BERT. Attention heads are 64 wide, and the feed-forward layer is four
    times the hidden size.
    """

    layers: int
    """Transformer layers."""
    hidden: int
    """Hidden size, a multiple of 64."""
    lr: float
    """Peak learning rate from random weights. At 5e-4 bert-small does not learn; the larger
    models use its rate.
    """


SHAPES = {
    "bert-tiny": BertShape(2, 128, 5e-4),
    "bert-mini": BertShape(4, 256, 5e-4),
    "bert-small": BertShape(4, 512, 1e-4),
    "bert-medium": BertShape(8, 512, 1e-4),
    "bert-base": BertShape(12, 768, 1e-4),
}
"""The built-in models, by the name that follows ``--model``."""
POSITIONS = 512
"""Positions of a built-in model, as in BERT; longer rows raise the number."""


def bert_config(
    shape: BertShape, *, vocab_size: int, max_seq_len: int, dropout: float | None, **fields: Any
) -> Any:
    """Return the transformers config of a BERT of this shape. ``fields``: additional fields."""
    from transformers import BertConfig

    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        intermediate_size=4 * shape.hidden,
        max_position_embeddings=max(POSITIONS, max_seq_len),
        **fields,
    )
    set_dropout(config, dropout)
    return config


def check_encoder(options: TaskOptions, max_seq_len: int, kind: str, cannot: str) -> None:
    """Check a pretrained model that replaces a built-in one.

    ``kind``: transformers' name of the models with the right head, such as ``MASKED_LM``.
    ``cannot``: the message for other models. Raises ModelError, or ConfigError for more tokens than
    the model has positions.
    """
    if options.from_scratch:
        return
    folder = options.model_folder()
    check_kind(options.model, folder, kind, f"{cannot}; take a model such as BERT or RoBERTa")
    check_padding(options)
    check_length(options.model, folder, max_seq_len)


def hidden_size(options: TaskOptions) -> int | None:
    """Return the size of the model's hidden states; ``None`` if its config does not say it."""
    if options.from_scratch:
        return getattr(options.built_in[options.model], "hidden", None)
    config = read_config(options.model, options.model_folder())
    return next(
        (config[name] for name in ("hidden_size", "dim", "emb_dim") if name in config), None
    )

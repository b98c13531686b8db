"""The keys of a sentence-transformers folder: who follows each, and what the others have to be.

A key that changes embeddings and stands in no set here is refused, also one
that a new release brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distcore import ModelError

ENCODER_FOLLOWED = frozenset(("max_seq_length", "do_lower_case"))
"""Keys of an encoder that ``read_text_settings`` reads."""
ENCODER_NEUTRAL: Mapping[str, object] = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
"""Other keys of an encoder, and the value with which it is called as here."""
ENCODER_WITHOUT_EFFECT = frozenset(("unpad_inputs",))
"""Keys of an encoder that change its speed alone."""

POOLING_FOLLOWED = frozenset(
    {
        "pooling_mode",
        "include_prompt",
        "pooling_mode_cls_token",
        "pooling_mode_max_tokens",
        "pooling_mode_mean_tokens",
        "pooling_mode_mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens",
        "pooling_mode_lasttoken",
    }
)
"""Keys of a pooling that ``saved_pooling`` and ``read_text_settings`` read."""
POOLING_WITHOUT_EFFECT = frozenset(("word_embedding_dimension", "embedding_dimension"))
"""Sizes, which the encoder has, too."""

MODEL_FOLLOWED = frozenset(("prompts", "default_prompt_name"))
"""Keys of a model that ``read_text_settings`` reads."""
MODEL_NEUTRAL: Mapping[str, object] = {
    "model_type": "SentenceTransformer",
    "similarity_fn_name": "cosine",
}
"""Other keys of a model, and the value with which it is trained as here: loss and
metrics are of cosines.
"""
MODEL_WITHOUT_EFFECT = frozenset(("__version__", "requirements"))
"""Keys about the environment of a model."""


def check_encoder_keys(name: str, file: str, tree: Mapping[str, Any]) -> None:
    """Raise ModelError for a key of an encoder's file that this task does not have."""
    _check(name, file, tree, ENCODER_FOLLOWED | ENCODER_WITHOUT_EFFECT, ENCODER_NEUTRAL)


def check_pooling_keys(name: str, file: str, tree: Mapping[str, Any]) -> None:
    """Raise ModelError for a key of a pooling's file that this task does not have."""
    _check(name, file, tree, POOLING_FOLLOWED | POOLING_WITHOUT_EFFECT, {})


def check_model_keys(name: str, file: str, tree: Mapping[str, Any]) -> None:
    """Raise ModelError for a key of the whole model's file that this task does not have."""
    _check(name, file, tree, MODEL_FOLLOWED | MODEL_WITHOUT_EFFECT, MODEL_NEUTRAL)


def _check(
    name: str,
    file: str,
    tree: Mapping[str, Any],
    owned: frozenset[str],
    neutral: Mapping[str, object],
) -> None:
    for key, value in tree.items():
        # What is empty or off stands for a key that is not there.
        if key in owned or not value or value == neutral.get(key):
            continue
        instead = f"make it {neutral[key]!r}" if key in neutral else "take it out"
        raise ModelError(
            f"model {name}: {file}: {key} = {value!r}: this task does not have it; {instead} if"
            " embeddings may change, or take another model"
        )

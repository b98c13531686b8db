"""Other values for each key of a config: for tests of code that stands in for a model's own.

A model reads its config itself. What computes in its place, such as attention without padding,
or writes it down for another program, must repeat each key or refuse it. ``changes`` names them
all, so that no key is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from typing import Any

import pytest
from transformers import PreTrainedConfig

OF_EVERY_CONFIG = frozenset(PreTrainedConfig().to_dict())
"""Keys that are not of one type of model. They have owners in a test of their own."""
ROPE: dict[str, Any] = {"rope_theta": 1e4, "original_max_position_embeddings": 16}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
ROTATIONS: list[dict[str, Any]] = [
    LINEAR,
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, **ROPE},
    {"rope_type": "llama3", **LLAMA3, **ROPE},
]
"""Forms of rotary positions."""
WINDOWS = ["sliding_attention", "full_attention"]
OTHERS: dict[str, list[Any]] = {
    "activation": ["relu"],
    "activation_function": ["relu"],
    "attn_logit_softcapping": [3.0],
    "bos_token_id": [3],
    "classifier_activation": ["relu"],
    "classifier_dropout": [0.3],
    "classifier_pooling": ["mean"],
    "clip_qkv": [0.5],
    "dense_act_fn": ["silu"],
    "eos_token_id": [4],
    "feed_forward_proj": ["gated-gelu", "silu"],
    "final_logit_softcapping": [3.0],
    "hidden_act": ["relu"],
    "hidden_activation": ["relu"],
    "layer_types": [WINDOWS, WINDOWS[::-1], WINDOWS[:1] * 2, WINDOWS[1:] * 2],
    "mlp_only_layers": [[0]],
    "n_inner": [40],
    "no_rope_layers": [[0, 1]],
    "num_ln_in_parallel_attn": [1],
    "pad_token_id": [1],
    "pooler_act": ["relu"],
    "pooler_hidden_act": ["relu"],
    "pos_att_type": [["c2p"], ["p2c", "c2p"]],
    "rope_parameters": ROTATIONS,
    "sliding_window": [4],
    "summary_activation": ["tanh"],
    "summary_type": ["mean"],
    "use_bidirectional_attention": [True],
}
"""Other values of keys whose own say little of them: words, lists, tables, and ``None``."""
UNDECLARED: dict[str, list[Any]] = {
    "attention_chunk_size": [4],
    "classifier_dropout": [0.3],
    "is_causal": [False],
    "per_layer_config": [{"0": {"sliding_window": 4}}],
    "token_classification_bias": [False],
}
"""Keys that transformers reads from any config, though few classes of a config declare them."""


def changes(config: PreTrainedConfig) -> list[tuple[str, Any]]:
    """Return each key of ``config`` with each other value of it.

    Raises LookupError for a key that has no other value here, such as one of a newer transformers.
    """
    own = {key: value for key, value in config.to_dict().items() if key not in OF_EVERY_CONFIG}
    changed = [(key, other) for key, value in own.items() for other in _others(key, value)]
    undeclared = {key: others for key, others in UNDECLARED.items() if key not in own}
    return changed + [(key, other) for key, others in undeclared.items() for other in others]


def with_others_slow(cases: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Return the cases as parameters: the ``few`` as programs, all others as slow."""
    made = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        mark = pytest.mark.programs if case in few else pytest.mark.slow
        made.append(pytest.param(*values, marks=mark))
    return made


def _others(key: str, value: Any) -> list[Any]:
    if isinstance(value, dict) and any(isinstance(part, dict) for part in value.values()):
        # Rotary positions by the type of a layer.
        return [{kind: deepcopy(LINEAR) for kind in value}]
    if key in OTHERS:
        # Copies, since a config changes what it is given.
        return [other for other in deepcopy(OTHERS[key]) if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 1]
    if isinstance(value, float):
        return [2 * value or 0.25]
    raise LookupError(f"nobody owns the key {key} = {value!r}: write another value into OTHERS")

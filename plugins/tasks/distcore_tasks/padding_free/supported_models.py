"""Heads and model types that are exact without padding. A test builds each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

Read = Literal["any", "tokens", "first"]
"""Part of the layers' output that a head reads: anything, single tokens, or each row's first."""
SINCE = (5, 0)
"""First version of transformers whose models pass all keyword arguments on to attention."""
ENCODERS = ("bert", "distilbert", "electra", "roberta", "xlm-roberta", "camembert")
"""Model types whose tokens attend to the whole row."""
DECODERS = (
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "cwm",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""Model types whose tokens attend to earlier tokens of the row only, maybe within a window."""
LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Types of a decoder's layers that are known to be right.

Others, such as convolutions, would join rows.
"""
WINDOW_UNTOLD = ("qwen2_moe",)
"""Model types that pass a window by the mask alone, which padding-free attention ignores."""
RELATIVE = ("t5",)
"""Model types whose encoder, and decoder if any, have relative position biases."""
FROM_PAD = ("roberta", "xlm-roberta", "camembert")
"""Model types that number positions from ``pad_token_id + 1``."""
LAST = 5 / 6
"""Fraction of the last layer that is skipped if the head reads first tokens.

It is all products but keys and values. A layer has 12 products of hidden size times hidden size
for each token. Two of them compute keys and values.
"""


@dataclass(frozen=True, slots=True)
class Head:
    """A head on a model's layers."""

    types: tuple[str, ...]
    """Model types that are exact below this head."""
    reads: Read
    """Part of the layers' output that the head reads."""


HeadName = Literal["row classifier", "token classifier", "masked tokens", "decoder"]
HEADS: dict[HeadName, Head] = {
    "row classifier": Head((*ENCODERS, *DECODERS), "first"),
    "token classifier": Head((*ENCODERS, *DECODERS, *RELATIVE), "any"),
    "masked tokens": Head(ENCODERS, "tokens"),
    "decoder": Head(RELATIVE, "any"),
}
"""Heads of the tasks."""


def why_not(config: Mapping[str, Any], known: tuple[str, ...]) -> str | None:
    """Return why a model of this config.json needs padding; ``None`` if its type is ``known``."""
    kind = config["model_type"]
    if reason := why_unknown(config, known):
        return reason
    installed = version("transformers")
    major_and_minor = tuple(int(part) for part in installed.split(".")[:2])
    if major_and_minor < SINCE:
        return f"transformers {installed} is older than {SINCE[0]}.{SINCE[1]}"
    layer_types = config.get("layer_types") or ()
    has_windows = config.get("use_sliding_window") or "sliding_attention" in layer_types
    if has_windows and kind in WINDOW_UNTOLD:
        return f"this {kind} has layers whose tokens see a window of their row"
    return None


def why_unknown(config: Mapping[str, Any], known: tuple[str, ...]) -> str | None:
    """Return why attention within rows may be inexact for a model.

    ``None`` if its type is ``known``.
    """
    kind = config["model_type"]
    if kind not in known:
        return f"{kind} is none of {', '.join(known)}"
    if others := sorted(set(config.get("layer_types") or ()) - LAYER_TYPES):
        return f"this {kind} has layers of type {', '.join(others)}"
    # Of any decoder transformers reads the second key, which no class of a config declares.
    looks_ahead = config.get("use_bidirectional_attention") or not config.get("is_causal", True)
    if kind not in ENCODERS and looks_ahead:
        return f"this {kind} attends to later tokens, too"
    return None


def gives_first(config: Mapping[str, Any]) -> bool:
    """Return True if the last layer of such a model can be limited to first tokens."""
    return config["model_type"] in ENCODERS and not config.get("is_decoder")


def skipped_fraction(config: Mapping[str, Any]) -> float:
    """Return the fraction of all layers' products that is skipped for such a model, from 0 to 1."""
    layers = config.get("num_hidden_layers", config.get("n_layers", 12))
    return LAST / max(1, int(layers)) if gives_first(config) else 0.0

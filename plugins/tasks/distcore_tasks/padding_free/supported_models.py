"""Heads and model types that are exact without padding. A test builds each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

Read = Literal["any", "tokens", "first"]
"""Part of the layers' output that a head reads: anything, single tokens, or the first token of each row."""
SINCE = (5, 0)
"""First version of transformers whose models pass all keyword arguments on to attention."""
ENCODERS = ("bert", "distilbert", "electra", "roberta", "xlm-roberta", "camembert")
"""Model types whose tokens attend to the whole row."""
DECODERS = ("gpt2", "llama", "qwen2", "qwen3")
"""Model types whose tokens attend to earlier tokens only."""
RELATIVE = ("t5",)
"""Model types whose encoder has relative position biases."""
FROM_PAD = ("roberta", "xlm-roberta", "camembert")
"""Model types that number positions from ``pad_token_id + 1``."""
LAST = 5 / 6
"""Fraction of the last layer that is skipped if the head reads first tokens: all products but keys and values.

A layer has 12 products of hidden size times hidden size for each token. Two of them compute keys and values.
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
    "decoder": Head(RELATIVE, "any"),  # the encoder alone computes without padding
}
"""Heads of the tasks."""


def why_not(config: Mapping[str, Any], known: tuple[str, ...]) -> str | None:
    """Return the reason why a model of this config.json needs padding; ``None`` if its type is ``known``."""
    kind = config["model_type"]
    if kind not in known:
        return f"{kind} is none of {', '.join(known)}"
    if tuple(int(part) for part in version("transformers").split(".")[:2]) < SINCE:
        return f"transformers {version('transformers')} is older than {SINCE[0]}.{SINCE[1]}"
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        return f"this {kind} has layers whose tokens see a window of their row"
    return None


def gives_first(config: Mapping[str, Any]) -> bool:
    """Return True if the last layer of a model of this config.json can be limited to first tokens."""
    return config["model_type"] in ENCODERS and not config.get("is_decoder")


def skipped_fraction(config: Mapping[str, Any]) -> float:
    """Return the fraction of all layers' products that is skipped for such a model, from 0 to 1."""
    layers = config.get("num_hidden_layers", config.get("n_layers", 12))
    return LAST / max(1, int(layers)) if gives_first(config) else 0.0

"""Heads and model types that are known to be exact without padding: a test builds each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

Read = Literal["any", "tokens", "first"]
"""What a head reads of the layers' output: anything, single tokens, or the first token of each row."""
SINCE = (5, 0)
"""The first transformers whose models hand all keyword arguments on to attention."""
ENCODERS = ("bert", "distilbert", "electra", "roberta", "xlm-roberta", "camembert")
"""Model types in which a token sees its whole row."""
DECODERS = ("gpt2", "llama", "qwen2", "qwen3")
"""Model types in which a token sees what comes before it."""
RELATIVE = ("t5",)
"""Model types whose encoder adds the distance of two tokens to attention."""
FROM_PAD = ("roberta", "xlm-roberta", "camembert")
"""Model types that number positions from the padding token on."""
LAST = 5 / 6
"""The fraction of a layer that is skipped where a head reads its first tokens: all products but keys and values.

A layer has 12 products of hidden size times hidden size for each token; two of them make keys and values.
"""


@dataclass(frozen=True, slots=True)
class Head:
    """What stands on a model's layers."""

    types: tuple[str, ...]
    """The model types that are known to be exact below it."""
    reads: Read
    """What it reads of the layers' output."""


HeadName = Literal["row classifier", "token classifier", "masked tokens", "decoder"]
HEADS: dict[HeadName, Head] = {
    "row classifier": Head((*ENCODERS, *DECODERS), "first"),
    "token classifier": Head((*ENCODERS, *DECODERS, *RELATIVE), "any"),
    "masked tokens": Head(ENCODERS, "tokens"),
    "decoder": Head(RELATIVE, "any"),  # the encoder alone computes without padding
}
"""The heads of the tasks."""


def why_not(config: Mapping[str, Any], known: tuple[str, ...]) -> str | None:
    """Return why a model of this config.json is not run without padding; ``None`` if its type is ``known``."""
    kind = config["model_type"]
    if kind not in known:
        return f"{kind} is none of {', '.join(known)}"
    if tuple(int(part) for part in version("transformers").split(".")[:2]) < SINCE:
        return f"transformers {version('transformers')} is older than {SINCE[0]}.{SINCE[1]}"
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        return f"this {kind} has layers whose tokens see a window of their row"
    return None


def gives_first(config: Mapping[str, Any]) -> bool:
    """Return True if the last layer of a model of this config.json can compute the first token of each row alone."""
    return config["model_type"] in ENCODERS and not config.get("is_decoder")


def skipped_fraction(config: Mapping[str, Any]) -> float:
    """Return the fraction of the layers' products that is skipped then, from 0 to 1."""
    layers = config.get("num_hidden_layers", config.get("n_layers", 12))
    return LAST / max(1, int(layers)) if gives_first(config) else 0.0

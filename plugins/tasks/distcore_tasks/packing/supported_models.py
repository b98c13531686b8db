"""The model types that are known to be right without padding: a test builds each of them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Literal

Read = Literal["any", "tokens", "first"]
"""What a head reads of what the layers give: anything, single tokens, or the first token of each row."""
SINCE = (5, 0)
"""The first transformers whose models hand on to attention what this needs."""
ENCODERS = ("bert", "distilbert", "electra", "roberta", "xlm-roberta", "camembert")
"""Model types whose rows see all of themselves."""
DECODERS = ("gpt2", "llama", "qwen2", "qwen3")
"""Model types whose tokens see what comes before them."""
RELATIVE = ("t5",)
"""Model types whose encoder adds to attention how far tokens are apart."""
FROM_PAD = ("roberta", "xlm-roberta", "camembert")
"""Model types that number places from the padding token on."""
LAST = 5 / 6
"""What of a layer is left out where a head reads its first tokens: all products but those for keys and values.

A layer has 12 of hidden size times hidden size for each token, two of them for keys and values.
"""


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
    """Return whether a model of this config.json has a last layer that can do with the first token of each row."""
    return config["model_type"] in ENCODERS and not config.get("is_decoder")


def skipped_fraction(config: Mapping[str, Any]) -> float:
    """Return which part of the layers' products is not computed then, from 0 to 1."""
    layers = config.get("num_hidden_layers", config.get("n_layers", 12))
    return LAST / max(1, int(layers)) if gives_first(config) else 0.0

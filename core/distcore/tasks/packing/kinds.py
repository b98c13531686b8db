"""The model types that are known to be right without padding: a test builds each of them."""

from __future__ import annotations

from importlib.metadata import version

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


def why_not(kind: str, known: tuple[str, ...]) -> str | None:
    """Return why a model of the type ``kind`` is not run without padding; ``None`` if it is one of the ``known``."""
    if kind not in known:
        return f"{kind} is none of {', '.join(known)}"
    if tuple(int(part) for part in version("transformers").split(".")[:2]) < SINCE:
        return f"transformers {version('transformers')} is older than {SINCE[0]}.{SINCE[1]}"
    return None

"""Built-in causal language models: GPT-2 in published and smaller sizes, Llama in some of
these, a tiny Mixtral.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a built-in model. Its feed-forward layer is four times the hidden size,
    Llama's and Mixtral's 8/3.
    """

    family: Literal["gpt2", "llama", "mixtral"]
    """Architecture, as transformers names it."""
    layers: int
    """Transformer layers."""
    hidden: int
    """Hidden size."""
    heads: int
    """Attention heads."""
    lr: float
    """Peak learning rate from random weights. Only the tiny and mini ones are measured."""
    experts: int = 0
    """Experts of each feed-forward layer; a token uses two. 0: a layer without experts."""


SHAPES = {
    "gpt2-tiny": Shape("gpt2", 2, 128, 2, 2e-3),
    "gpt2-mini": Shape("gpt2", 4, 256, 4, 1e-3),
    "gpt2-base": Shape("gpt2", 12, 768, 12, 6e-4),
    "gpt2-medium": Shape("gpt2", 24, 1024, 16, 3e-4),
    "gpt2-large": Shape("gpt2", 36, 1280, 20, 2.5e-4),
    "gpt2-xl": Shape("gpt2", 48, 1600, 25, 2e-4),
    "llama-tiny": Shape("llama", 2, 128, 2, 2e-3),
    "llama-mini": Shape("llama", 4, 256, 4, 1e-3),
    "llama-base": Shape("llama", 12, 768, 12, 6e-4),
    "mixtral-tiny": Shape("mixtral", 2, 128, 2, 2e-3, experts=4),
}
"""The built-in models, by the name that follows ``--model``."""
PUBLISHED = ("gpt2-medium", "gpt2-large", "gpt2-xl")
"""Names with published weights on the hub, under ``openai-community``."""

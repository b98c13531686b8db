"""Built-in encoder-decoder models: T5s."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class T5Shape:
    """Size of a T5. Attention heads are 64 wide, and the feed-forward layer is four
    times the hidden size.
    """

    layers: int
    """Transformer layers of the encoder, and of the decoder."""
    hidden: int
    """Hidden size, a multiple of 64."""
    lr: float
    """Peak learning rate from random weights. Only that of t5-tiny is measured."""


SHAPES = {
    "t5-tiny": T5Shape(2, 128, 3e-3),
    "t5-mini": T5Shape(4, 256, 1e-3),
    "t5-medium": T5Shape(6, 512, 5e-4),
}
"""The built-in models, by the name that follows ``--model``."""

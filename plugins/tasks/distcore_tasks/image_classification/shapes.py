"""Built-in image models: a convolutional network, residual networks and vision transformers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Size of a convolutional network."""

    widths: tuple[int, ...]
    """Channels of each block. All blocks but the first halve height and width."""
    lr: float
    """Peak learning rate from random weights."""


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """Size of a residual network (He et al. 2015) with batch normalization."""

    depths: tuple[int, ...]
    """Blocks of each stage. All stages but the first halve height and width."""
    widths: tuple[int, ...]
    """Channels of each stage."""
    layer: str
    """``basic``: blocks of two convolutions; ``bottleneck``: of three."""
    lr: float
    """Peak learning rate from random weights."""


@dataclass(frozen=True, slots=True)
class ViTShape:
    """Size of a transformer. Attention heads are 64 wide, and the feed-forward layer is four
    times the hidden size.
    """

    layers: int
    """Transformer layers."""
    hidden: int
    """Hidden size, a multiple of 64."""
    lr: float
    """Peak learning rate from random weights."""


SHAPES: dict[str, ConvShape | ResNetShape | ViTShape] = {
    "conv-tiny": ConvShape((32, 64, 128), 3e-3),
    "resnet-tiny": ResNetShape((1, 1, 1), (32, 64, 128), "basic", 3e-3),
    "resnet-18": ResNetShape((2, 2, 2, 2), (64, 128, 256, 512), "basic", 1e-3),
    "resnet-50": ResNetShape((3, 4, 6, 3), (256, 512, 1024, 2048), "bottleneck", 1e-3),
    "vit-tiny": ViTShape(2, 128, 1e-3),
    "vit-mini": ViTShape(4, 256, 5e-4),
    "vit-base": ViTShape(12, 768, 1e-4),
}
"""The built-in models, by the name that follows ``--model``."""

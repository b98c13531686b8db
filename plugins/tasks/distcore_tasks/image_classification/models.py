"""Image models: built-in ones with random weights, local folders and hub models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distcore_tasks.image_classification.options import ImageOptions
from distcore_tasks.image_classification.shapes import SHAPES, ResNetShape, ViTShape
from distcore_tasks.shared.pretrained import class_fields, load_model, set_dropout

if TYPE_CHECKING:
    from torch import nn


PATCHES = 7
"""Minimum number of patches along a side of an image, unless the image is very small."""
PATCH_SIZES = (2, 16)
"""Smallest and largest side of a patch in pixels. Published vision transformers use the largest."""


def patch_size(image_size: int) -> int:
    """Return the side of a built-in transformer's patches: the largest divisor of the image
    size within the limits.
    """
    most = min(max(image_size // PATCHES, PATCH_SIZES[0]), PATCH_SIZES[1])
    return max(side for side in range(1, most + 1) if image_size % side == 0)


def build_model(options: ImageOptions, classes: Sequence[str], image_size: int) -> nn.Module:
    """Return the configured model in fp32, with a head for ``classes``, for images of
    this height and width.

    The model maps ``pixel_values`` to an object with ``logits``. Under torch's meta device, no
    weights are read. Raises ModelError.
    """
    shape, fields = SHAPES.get(options.model), class_fields(classes)
    if shape is None:
        folder = options.model_folder()
        return load_model(
            "AutoModelForImageClassification", options.model, folder, options.dropout, **fields
        )
    if isinstance(shape, ViTShape):
        return _transformer(shape, options, image_size, fields)
    if isinstance(shape, ResNetShape):
        return _residual(shape, fields)
    from distcore_tasks.image_classification.conv import ConvNet

    return ConvNet(shape.widths, len(classes), options.dropout or 0.0)


def _transformer(
    shape: ViTShape, options: ImageOptions, image_size: int, fields: dict[str, Any]
) -> nn.Module:
    """Return a vision transformer; ``fields``: the classes, as fields of its config."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        intermediate_size=4 * shape.hidden,
        image_size=image_size,
        patch_size=patch_size(image_size),
        **fields,
    )
    set_dropout(config, options.dropout)
    model: nn.Module = ViTForImageClassification(config)
    return model


def _residual(shape: ResNetShape, fields: dict[str, Any]) -> nn.Module:
    """Return a residual network; ``fields``: the classes, as fields of its config."""
    from transformers import ResNetConfig, ResNetForImageClassification

    # A bottleneck widens its inputs by a factor of 4; basic layers keep the width.
    first_width = 64 if shape.layer == "bottleneck" else shape.widths[0]
    config = ResNetConfig(
        embedding_size=first_width,
        hidden_sizes=list(shape.widths),
        depths=list(shape.depths),
        layer_type=shape.layer,
        **fields,
    )
    model: nn.Module = ResNetForImageClassification(config)
    return model

"""Preprocess pixels for a model by size, scale, mean and standard deviation; read
and write these settings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore import ModelError
from distcore_tasks.image_classification.decoding import Resizing
from distcore_tasks.image_classification.processors import BILINEAR, sides_of, with_defaults

if TYPE_CHECKING:
    from torch import Tensor

FILE = "preprocessor_config.json"
"""File of these settings in a model folder."""
Triple = tuple[float, float, float]
"""One value each for red, green and blue."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """The map from pixels to model inputs: ``(pixel * scale - mean) / std``."""

    size: int
    """Height and width in pixels."""
    resample: int = BILINEAR
    """Pillow's number of the resize filter."""
    scale: float = 1 / 255
    """Factor for pixels, which range from 0 to 255."""
    mean: Triple = (0.5, 0.5, 0.5)
    """Means, which are subtracted from scaled values."""
    std: Triple = (0.5, 0.5, 0.5)
    """Standard deviations, by which the differences are divided."""
    cut_from: int | None = None
    """Length to which an image is resized before its middle is cut out; ``None``: to ``size``,
    and nothing is cut.
    """
    keeps_sides: bool = False
    """Whether this is the length of the shorter side, and the longer one stays in proportion."""

    @property
    def resizing(self) -> Resizing:
        """The map from an image to a square of pixels."""
        return Resizing(self.size, self.resample, self.cut_from, self.keeps_sides)

    def at(self, size: int) -> Preprocessing:
        """Return the same at another size, with the same part of an image cut out."""
        cut_from = None if self.cut_from is None else round(self.cut_from * size / self.size)
        return replace(self, size=size, cut_from=cut_from)

    def values(self, images: np.ndarray) -> Tensor:
        """Return the values, fp32 ``(n, 3, size, size)``, of uint8 ``(n, size, size, 3)``."""
        import torch

        mean = np.asarray(self.mean, np.float32)
        std = np.asarray(self.std, np.float32)
        # A pixel is one of 256, so that each value is computed once, and looked up: in a third
        # of the time.
        pixels = np.arange(256, dtype=np.uint8)[:, None]
        value_of_pixel = (pixels * np.float32(self.scale) - mean) / std
        rows, height, width, _ = images.shape
        values = np.empty((rows, 3, height, width), np.float32)
        for channel in range(3):
            values[:, channel] = value_of_pixel[:, channel].take(images[..., channel])
        return torch.from_numpy(values)

    def save(self, folder: Path) -> None:
        """Write the settings for transformers, for any of its image models."""
        side = {"height": self.size, "width": self.size}
        resized: dict[str, Any] = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": side,
        }
        if self.cut_from is not None:
            # Another class, because that of ViT cuts nothing.
            length = self.cut_from
            size = {"height": length, "width": length}
            if self.keeps_sides:
                size = {"shortest_edge": length}
            resized |= {"image_processor_type": "BitImageProcessor", "size": size}
            resized |= {"do_center_crop": True, "crop_size": side}
        tree = {
            **resized,
            "resample": self.resample,
            "do_rescale": True,
            "rescale_factor": self.scale,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        text = json.dumps(tree, indent=2)
        (folder / FILE).write_text(f"{text}\n", encoding="utf-8")


def read_preprocessing(name: str, folder: Path) -> Preprocessing:
    """Read ``FILE`` in ``folder``, the folder of the model ``name``.

    Raises ModelError, one line.
    """
    try:
        tree = with_defaults(json.loads((folder / FILE).read_text(encoding="utf-8")))
        if (resample := int(tree.get("resample", BILINEAR))) not in range(6):
            raise ValueError(f"resample = {resample} is none of Pillow's filters, 0 to 5")
        normalized = tree.get("do_normalize", True)
        size, cut_from, keeps_sides = sides_of(tree)
        mean = _triple("image_mean", tree["image_mean"]) if normalized else (0.0, 0.0, 0.0)
        std = (
            _triple("image_std", tree["image_std"])
            if normalized or tree.get("include_top")
            else (1.0, 1.0, 1.0)
        )
        return Preprocessing(
            size=size,
            resample=resample,
            scale=(
                float(tree.get("rescale_factor", 1 / 255)) if tree.get("do_rescale", True) else 1.0
            ),
            mean=mean,
            std=_squared(std) if normalized and tree.get("include_top") else std,
            cut_from=cut_from,
            keeps_sides=keeps_sides,
        )
    except KeyError as error:
        raise ModelError(f"model {name}: {FILE} has no {error.args[0]!r}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"model {name}: {FILE} cannot be used: {error}") from None


def _squared(std: Triple) -> Triple:
    """Return what EfficientNet's ``include_top`` divides by: it divides by the standard
    deviation a second time.
    """
    red, green, blue = (deviation * deviation for deviation in std)
    return red, green, blue


def _triple(key: str, values: Any) -> Triple:
    """Return a value for each color; one number is that of all three, as in transformers."""
    if isinstance(values, int | float):
        values = (values,) * 3
    if len(values) != 3:
        raise ValueError(
            f"{key} has {len(values)} values, and images have three channels here: red, green and"
            " blue"
        )
    red, green, blue = values
    return float(red), float(green), float(blue)

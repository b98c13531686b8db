"""Datasets of images with classes, and their augmentation by epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from distcore import ConstantColumn, row_random
from distcore_data import RowOrder
from distcore_tasks.image_classification.options import Augment
from distcore_tasks.image_classification.preprocessing import Preprocessing
from distcore_tasks.image_classification.rows import Images

if TYPE_CHECKING:
    from torch import Tensor

Change = Callable[[np.ndarray, int], np.ndarray]
"""Map an image, uint8 ``(size, size, 3)``, and its row to another image."""


class OneEach:
    """Rows of one size, each of which is one item of the mean loss."""

    if TYPE_CHECKING:

        def __len__(self) -> int: ...

    @property
    def lengths(self) -> ConstantColumn:
        """Ones: no image is decoded for its length."""
        return ConstantColumn(len(self), 1)

    @property
    def items(self) -> ConstantColumn:
        """Ones."""
        return ConstantColumn(len(self), 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageDataset(OneEach):
    """Images with a class each; implements ``distcore.Dataset``."""

    images: Images
    """The source."""
    rows: np.ndarray
    """Numbers of these images in the source, int64 ``(rows,)``."""
    labels: np.ndarray
    """Class of each, int64 ``(rows,)``."""
    preprocessing: Preprocessing
    """Preprocessing of pixels for the model."""
    content: str
    """SHA-256 over images and classes, in hexadecimal."""
    change: Change | None = None
    """Change of each image before it enters a batch; ``None``: no change."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``pixel_values``, fp32 ``(n, 3, size, size)``, and ``labels``, int64
        ``(n,)``, of these rows.
        """
        import torch

        size, resizing = self.preprocessing.size, self.preprocessing.resizing
        pixels = np.empty((len(indices), size, size, 3), np.uint8)
        for place, row in enumerate(indices.tolist()):
            image = self.images.pixels(int(self.rows[row]), resizing)
            pixels[place] = self.change(image, row) if self.change else image
        return {
            "pixel_values": self.preprocessing.values(pixels),
            "labels": torch.from_numpy(self.labels[indices]),
        }

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each image: ``file`` and, in a file with several images,
        ``row``, counted from 1.
        """
        return map(self.images.store.origin, self.rows.tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class AugmentedImages(ImageDataset):
    """Training images that change from epoch to epoch."""

    augment: Augment
    """Settings of the augmentation."""
    seed: int
    """Seed of the random changes."""

    def at(self, epoch: int) -> ImageDataset:
        """Return the images as they are in ``epoch``."""

        return ImageDataset(
            images=self.images,
            rows=self.rows,
            labels=self.labels,
            preprocessing=self.preprocessing,
            content=self.content,
            row_order=self.row_order,
            change=change_of(self.augment, self.seed, epoch),
        )


def image_dataset(
    images: Images, rows: np.ndarray, labels: np.ndarray, preprocessing: Preprocessing
) -> ImageDataset:
    """Return the dataset of these rows of ``images``, without augmentation. ``labels``: the
    class of each row.
    """
    content = hashlib.sha256(np.ascontiguousarray(images.digests[rows]).data)
    content.update(np.ascontiguousarray(labels, dtype="<i8").data)
    return ImageDataset(
        images=images,
        rows=rows,
        labels=labels,
        preprocessing=preprocessing,
        content=content.hexdigest(),
    )


def change_of(augment: Augment, seed: int, epoch: int) -> Change:
    """Return the change of images in ``epoch``, which depends on seed, epoch and row only."""
    return partial(_change, augment, seed, epoch)


def _change(augment: Augment, seed: int, epoch: int, image: np.ndarray, row: int) -> np.ndarray:
    return augmented(image, augment, row_random(seed, epoch, row))


def augmented(image: np.ndarray, augment: Augment, random: np.random.Generator) -> np.ndarray:
    """Return ``image``, uint8 ``(size, size, 3)``, randomly shifted and mirrored. Edge
    pixels fill the gap.
    """
    most = round(augment.shift * len(image))
    down, right = random.integers(-most, most + 1, 2).tolist()
    mirrored = augment.flip and random.random() < 0.5
    places = np.arange(len(image))
    moved: np.ndarray = image[np.clip(places - down, 0, len(image) - 1)][
        :, np.clip(places - right, 0, len(image) - 1)
    ]
    return moved[:, ::-1] if mirrored else moved

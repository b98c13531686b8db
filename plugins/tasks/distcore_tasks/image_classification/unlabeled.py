"""Images without labels in a folder, files, shards or a split. A batch reads its
images one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distcore import DataError
from distcore_data import find_split, read_records
from distcore_tasks.image_classification.arrays import check_resizing
from distcore_tasks.image_classification.dataset import OneEach
from distcore_tasks.image_classification.encoded import checked_images, have_room
from distcore_tasks.image_classification.options import Columns
from distcore_tasks.image_classification.preprocessing import Preprocessing
from distcore_tasks.image_classification.rows import Store, read_pixels
from distcore_tasks.image_classification.sources import has_columns, open_unlabeled

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image on disk."""

    store: Store
    """Storage of the image."""
    row: int
    """Number of the image in the storage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnlabeledImages(OneEach):
    """Implements ``Dataset`` of ``distcore.plugin.task.task``."""

    source: str
    """Name of the folder or file in messages."""
    images: Sequence[StoredImage]
    """The images, in order."""
    preprocessing: Preprocessing
    """Preprocessing of pixels for the model."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``pixel_values`` of the rows ``indices``, as ``ImageDataset.batch`` does."""
        resizing = self.preprocessing.resizing
        images = [self.images[index] for index in indices]
        pixels = [read_pixels(self.source, image.store, image.row, resizing) for image in images]
        return {"pixel_values": self.preprocessing.values(np.stack(pixels))}

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each image: ``file`` and, in a file with several images,
        ``row``, counted from 1.
        """
        return (image.store.origin(image.row) for image in self.images)


def open_images(
    source: Path, columns: Columns, others: Mapping[str, str]
) -> Iterator[tuple[object, ...]]:
    """Yield each image with its values in the columns ``others``, after decoding all images once.

    Remote images that the cache does not hold are fetched as they come. Folders of images and
    arrays have no columns. Raises DataError, also for ``others`` of a folder or an array.
    """
    opened = find_split(str(source)) or source
    if has_columns(opened) and not have_room(opened):
        return (
            (StoredImage(image, row), *values)
            for image, row, values in checked_images(opened, columns, others)
        )
    store = open_unlabeled(opened, columns)
    images = (StoredImage(store, row) for row in range(len(store)))
    if not others:
        return ((image,) for image in images)
    if not has_columns(opened):
        raise DataError(f"{source}: has no columns that could name an image; leave out --id-column")
    return (
        (image, *record) for image, record in zip(images, read_records(opened, others), strict=True)
    )


def unlabeled_images(
    source: str, images: Sequence[StoredImage], preprocessing: Preprocessing
) -> UnlabeledImages:
    """Return these images as a dataset.

    Raises DataError if they need resizing but Pillow is not installed.
    """
    if images:
        check_resizing(f"data file {source}", images[0].store, preprocessing.resizing)
    return UnlabeledImages(source=f"data {source}", images=images, preprocessing=preprocessing)

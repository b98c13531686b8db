"""Images without labels in a folder, files, shards or a split. A batch reads its
images one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcore import DataError
from distcore_data import find_split, read_records
from distcore_tasks.image_classification.arrays import check_resizing
from distcore_tasks.image_classification.decoding import Resizing
from distcore_tasks.image_classification.encoded import checked_images, have_room
from distcore_tasks.image_classification.options import Columns
from distcore_tasks.image_classification.preprocessing import Preprocessing
from distcore_tasks.image_classification.rows import ImageDataset, image_dataset, stacked
from distcore_tasks.image_classification.sources import has_columns, open_unlabeled
from distcore_tasks.image_classification.stores import Store, read_pixels
from distcore_tasks.rows.table import CachedTable, Rows


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image on disk."""

    store: Store
    """Storage of the image."""
    row: int
    """Number of the image in the storage."""


@dataclass(frozen=True, eq=False)
class GivenImages:
    """Images to predict; implements ``ImageTable``."""

    source: str
    """Name of the folder or file in messages."""
    images: Sequence[StoredImage]
    """The images, in order."""
    resizing: Resizing
    """Size of the images in a batch."""

    @property
    def labels(self) -> np.ndarray:
        """None."""
        return np.empty(0, np.int64)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def take(self, numbers: np.ndarray) -> Rows:
        """Return some images."""
        images = [self.images[number] for number in numbers.tolist()]
        pixels = [read_pixels(self.source, one.store, one.row, self.resizing) for one in images]
        return CachedTable({"pixels": stacked(pixels, self.resizing)}).all()

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each image."""
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
) -> ImageDataset:
    """Return these images as a dataset.

    Raises DataError if they need resizing but Pillow is not installed.
    """
    if images:
        check_resizing(f"data file {source}", images[0].store, preprocessing.resizing)
    table = GivenImages(f"data {source}", images, preprocessing.resizing)
    return image_dataset(table, preprocessing)

"""Rows of images: decoded and resized when they are asked for, each with its class.

Stored images have been decoded once, when they were checked; streamed ones are read by number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from distcore import Column, ConstantColumn, row_random
from distcore_data import ChosenRows
from distcore_tasks.image_classification.decoding import Resizing, decode
from distcore_tasks.image_classification.options import Augment
from distcore_tasks.image_classification.preprocessing import Preprocessing
from distcore_tasks.image_classification.stores import Images
from distcore_tasks.image_classification.stream_sources import NumberedImages
from distcore_tasks.rows.dataset import RowDataset
from distcore_tasks.rows.lazy_table import StreamedTable
from distcore_tasks.rows.pipeline import BatchInfo, BatchRows, Refuse, TokenizerInfo
from distcore_tasks.rows.table import CachedTable, Rows, Table
from distcore_tasks.shared.arrays import digest_arrays
from distcore_tasks.shared.classification.coded import CodedTargets
from distcore_tasks.shared.stored_arrays import Entries
from distcore_tasks.shared.streams.values import NumberedValues

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ImageRows(BatchRows):
    """Images of one size, each of which is one item of the mean loss."""

    preprocessing: Preprocessing
    """Preprocessing of pixels for the model."""
    augment: Augment | None = None
    """Settings of the random changes; ``None``: no change."""
    seed: int = 0
    """Seed of the changes."""
    epoch: int | None = None
    """The epoch of the changes; ``None``: no change."""

    def length(self, rows: Rows) -> np.ndarray:
        """Return ones."""
        return np.ones(len(rows), np.int64)

    def length_column(self, table: Table) -> Column:
        """Return ones: no image is decoded for its length."""
        return ConstantColumn(len(table), 1)

    def item_column(self, table: Table, info: TokenizerInfo) -> Column:
        """Return ones."""
        return ConstantColumn(len(table), 1)

    def collate(self, rows: Rows, batch: BatchInfo, info: TokenizerInfo) -> dict[str, Tensor]:
        """Return ``pixel_values``, fp32 ``(n, 3, size, size)``, and ``labels``, int64 ``(n,)``.

        Images to predict have no ``labels``.
        """
        import torch

        pixels = rows["pixels"]
        if self.augment and self.epoch is not None:
            pixels = np.empty_like(pixels)
            for place, number in enumerate(batch.numbers.tolist()):
                random = row_random(self.seed, self.epoch, number)
                pixels[place] = augmented(rows["pixels"][place], self.augment, random)
        tensors = {"pixel_values": self.preprocessing.values(pixels)}
        if "label" in rows.table.columns:
            tensors["labels"] = torch.from_numpy(rows["label"])
        return tensors


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


class ImageTable(Table, Protocol):
    """Images by number.

    Their column ``pixels`` is uint8 ``(n, size, size, 3)``. Those that are not to be predicted have
    a ``label``, their class.
    """

    @property
    def labels(self) -> Entries:
        """Class of each, int64 ``(rows,)``; none of images to predict."""
        ...

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each image: ``file`` and, in a file with several images,
        ``row``, counted from 1.
        """
        ...


@dataclass(frozen=True, eq=False)
class StoredImages:
    """Images that have been decoded once; implements ``ImageTable``."""

    images: Images
    """The source."""
    rows: np.ndarray
    """Numbers of these images in the source, int64 ``(rows,)``."""
    labels: np.ndarray
    """Class of each, int64 ``(rows,)``."""
    resizing: Resizing
    """Size of the images in a batch."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def take(self, numbers: np.ndarray) -> Rows:
        """Return some images. Raises DataError for one that has changed since the check."""
        places = self.rows[numbers].tolist()
        pixels = stacked([self.images.pixels(row, self.resizing) for row in places], self.resizing)
        return CachedTable({"pixels": pixels, "label": self.labels[numbers]}).all()

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each image."""
        return map(self.images.store.origin, self.rows.tolist())


class StreamedImages(StreamedTable):
    """Images that are read and decoded when their step comes; implements ``ImageTable``."""

    def __init__(
        self, values: NumberedValues[bytes], resizing: Resizing, labels: Entries, source: str
    ) -> None:
        """``labels``: class of each, int64 ``(rows,)``. ``source``: its name in predictions."""
        super().__init__(values, partial(_decoded, resizing))
        self._resizing, self.labels, self._source = resizing, labels, source

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process begin without images in memory."""
        return type(self), (self.values, self._resizing, self.labels, self._source)

    def take(self, numbers: np.ndarray) -> Rows:
        """Return some images. Raises DataError with the row of one that cannot be decoded."""
        columns = super().take(numbers).table.columns
        return CachedTable({**columns, "label": self.labels[numbers]}).all()

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each image."""
        numbers = map(self.values.number, range(len(self)))
        return ({"file": self._source, "row": number + 1} for number in numbers)


def _decoded(resizing: Resizing, images: Sequence[bytes], refuse: Refuse) -> CachedTable:
    """Return the pixels of each image."""
    pixels = list[np.ndarray]()
    for place, image in enumerate(images):
        try:
            pixels.append(resizing.pixels(decode(image)))
        except ValueError as error:
            refuse(place, str(error))
    return CachedTable({"pixels": stacked(pixels, resizing)})


def stacked(images: Sequence[np.ndarray], resizing: Resizing) -> np.ndarray:
    """Return images as one array, uint8 ``(n, size, size, 3)``."""
    none = np.empty((0, resizing.size, resizing.size, 3), np.uint8)
    return np.stack(images) if images else none


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageDataset(RowDataset):
    """Images, of which those that are not to be predicted have a class each."""

    pipeline: ImageRows
    """What the task says of the images."""
    table: ImageTable
    """The images."""

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing of pixels for the model."""
        return self.pipeline.preprocessing

    @property
    def labels(self) -> Entries:
        """Class of each image, int64 ``(rows,)``."""
        return self.table.labels

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each image, as ``ImageTable`` does."""
        return self.table.origins()

    def augmented(self, augment: Augment, seed: int) -> ImageDataset:
        """Return the images with random changes in each epoch; itself if none are asked for."""
        if not augment.shift and not augment.flip:
            return self
        pipeline = replace(self.pipeline, augment=augment, seed=seed)
        return AugmentedImages(**(_fields(self) | {"pipeline": pipeline}))


@dataclass(frozen=True, kw_only=True, eq=False)
class AugmentedImages(ImageDataset):
    """Training images that change from epoch to epoch."""

    def at(self, epoch: int) -> ImageDataset:
        """Return the images as they are in ``epoch``."""
        pipeline = replace(self.pipeline, epoch=epoch)
        return ImageDataset(**(_fields(self) | {"pipeline": pipeline}))


def _fields(rows: ImageDataset) -> dict[str, Any]:
    return {name: getattr(rows, name) for name in ImageDataset.__dataclass_fields__}


def image_dataset(
    table: ImageTable, preprocessing: Preprocessing, content: str = ""
) -> ImageDataset:
    """Return the dataset of the images of a table. ``content``: their digest."""
    # Images have no tokens.
    info = TokenizerInfo(pad=0)
    return ImageDataset(pipeline=ImageRows(preprocessing), table=table, info=info, content=content)


def stored_dataset(
    images: Images, rows: np.ndarray, labels: np.ndarray, preprocessing: Preprocessing
) -> ImageDataset:
    """Return the dataset of these rows of ``images``. ``labels``: the class of each row."""
    content = hashlib.sha256(np.ascontiguousarray(images.digests[rows]).data)
    content.update(np.ascontiguousarray(labels, dtype="<i8").data)
    table = StoredImages(images, rows, labels, preprocessing.resizing)
    return image_dataset(table, preprocessing, content.hexdigest())


def streamed_dataset(
    images: NumberedImages,
    numbers: np.ndarray | ChosenRows,
    labels: Entries,
    preprocessing: Preprocessing,
) -> ImageDataset:
    """Return the dataset of these rows of ``images``. ``labels``: the class of each row."""
    values = images.values
    if len(numbers) < len(images):
        values = values.only([numbers] if isinstance(numbers, np.ndarray) else numbers.blocks())
    chosen = None if values.chosen is None else hashlib.sha256(values.chosen.bits.data).hexdigest()
    # The source tells which of these targets a row has.
    classes = digest_arrays(labels.targets if isinstance(labels, CodedTargets) else labels)
    facts = [images.content, *values.schema.columns.values(), chosen, classes]
    table = StreamedImages(values, preprocessing.resizing, labels, images.source)
    return image_dataset(table, preprocessing, hashlib.sha256(repr(facts).encode()).hexdigest())

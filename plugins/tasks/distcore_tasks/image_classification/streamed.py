"""Images that are read and decoded when their step comes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from distcore_data import ChosenRows
from distcore_tasks.image_classification.dataset import Change, OneEach, change_of
from distcore_tasks.image_classification.decoding import Resizing, decode
from distcore_tasks.image_classification.options import Augment
from distcore_tasks.image_classification.preprocessing import Preprocessing
from distcore_tasks.image_classification.stream_sources import NumberedImages
from distcore_tasks.shared.arrays import digest_arrays
from distcore_tasks.shared.classification.coded import CodedTargets
from distcore_tasks.shared.splits import Refuse
from distcore_tasks.shared.stored_arrays import Entries
from distcore_tasks.shared.streams.datasets import Encoded, EncodedRows, StreamedDataset

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedImages(OneEach, StreamedDataset):
    """Images with a class each."""

    source: str
    """Name of the source in predictions."""
    labels: Entries
    """Class of each, int64 ``(rows,)``."""
    preprocessing: Preprocessing
    """Preprocessing of pixels for the model."""
    change: Change | None = None
    """Change of each image before it enters a batch; ``None``: no change."""

    def row_length(self, row: Encoded) -> int:
        """Return 1."""
        return 1

    def row_items(self, row: Encoded) -> int:
        """Return 1."""
        return 1

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the images ``indices``, int64 ``(n,)``, as ``ImageDataset`` does."""
        import torch

        size = self.preprocessing.size
        images = [pixels.reshape(size, size, 3) for (pixels,) in self.rows.at(indices)]
        if self.change:
            images = [
                self.change(image, row) for image, row in zip(images, indices.tolist(), strict=True)
            ]
        pixels = np.stack(images) if images else np.empty((0, size, size, 3), np.uint8)
        labels = torch.from_numpy(self.labels[indices])
        return {"pixel_values": self.preprocessing.values(pixels), "labels": labels}

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each image: ``file`` and ``row``, counted from 1."""
        return ({"file": self.source, "row": self.rows.number(row) + 1} for row in range(len(self)))


@dataclass(frozen=True, kw_only=True, eq=False)
class AugmentedStream(StreamedImages):
    """Training images that change from epoch to epoch."""

    augment: Augment
    """Settings of the augmentation."""
    seed: int
    """Seed of the random changes."""

    def at(self, epoch: int) -> StreamedImages:
        """Return the images as they are in ``epoch``."""
        fields = {
            name: value
            for name, value in vars(self).items()
            if name not in ("augment", "seed", "change")
        }
        return StreamedImages(**fields, change=change_of(self.augment, self.seed, epoch))


def streamed_dataset(
    images: NumberedImages,
    numbers: np.ndarray | ChosenRows,
    labels: Entries,
    preprocessing: Preprocessing,
) -> StreamedImages:
    """Return the dataset of these rows of ``images``, without augmentation. ``labels``: the
    class of each row.
    """
    values = images.values
    if len(numbers) < len(images):
        values = values.only([numbers] if isinstance(numbers, np.ndarray) else numbers.blocks())
    chosen = None if values.chosen is None else hashlib.sha256(values.chosen.bits.data).hexdigest()
    # The source tells which of these targets a row has.
    classes = digest_arrays(labels.targets if isinstance(labels, CodedTargets) else labels)
    facts = [images.content, *values.schema.columns.values(), chosen, classes]
    return StreamedImages(
        rows=EncodedRows(values, partial(_decoded, preprocessing.resizing)),
        content=hashlib.sha256(repr(facts).encode()).hexdigest(),
        source=images.source,
        labels=labels,
        preprocessing=preprocessing,
    )


def _decoded(resizing: Resizing, images: Sequence[bytes], refuse: Refuse) -> Iterator[Encoded]:
    """Yield the pixels of each image."""
    for place, image in enumerate(images):
        try:
            yield (resizing.pixels(decode(image)).reshape(-1),)
        except ValueError as error:
            refuse(place, str(error))

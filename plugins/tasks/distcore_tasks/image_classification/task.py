"""Image classification: one label per image, by a convolutional network or a transformers model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Dataset, Datasets, FileRows
from distcore_tasks.image_classification.arrays import EMBEDDED
from distcore_tasks.image_classification.models import build_model
from distcore_tasks.image_classification.options import ImageOptions
from distcore_tasks.image_classification.prepare import (
    ImageDatasets,
    empty_datasets,
    prepare_images,
)
from distcore_tasks.image_classification.preprocessing import read_preprocessing
from distcore_tasks.image_classification.rows import ImageDataset
from distcore_tasks.image_classification.unlabeled import open_images, unlabeled_images
from distcore_tasks.shared.bad_rows import write_bad_rows
from distcore_tasks.shared.changed_files import write_files
from distcore_tasks.shared.classification.predictions import (
    class_lines,
    class_metrics,
    class_outputs,
    read_labels,
    remark,
    write_labels,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import RunConfig


@dataclass(frozen=True, kw_only=True)
class ImageClassification(ImageOptions):
    """One label per image; implements ``distcore.plugin.task.task.Task``."""

    laws_hold: ClassVar = True
    embedded: ClassVar = tuple(EMBEDDED)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the datasets after decoding all images once, unless they are streamed.

        Raises DataError, ModelError or ConfigError.
        """
        return prepare_images(self, config)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a classifier with one output per class of ``data``."""
        data = _images(data)
        model = build_model(self, data.classes, data.preprocessing.size)
        if config.device == "cpu" and config.precision != "fp32":
            from distcore_tasks.image_classification.small_images import (
                leave_out_weights_of_padding,
            )

            leave_out_weights_of_padding(model)
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over the images of
        ``batch``: fp32, without dimensions.
        """
        from torch.nn.functional import cross_entropy

        return cross_entropy(_logits(model, batch), batch["labels"], reduction="sum")

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``prediction``, ``scored``, ``scores`` of each image; with labels
        ``loss`` and ``label``, too.
        """
        return class_outputs(_logits(model, batch), batch.get("labels"))

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Return ``loss``, ``accuracy``, ``majority_accuracy`` and
        ``classification_report``; ``None`` without rows.
        """
        metrics = class_metrics(outputs, _images(data).classes)
        return metrics | remark(metrics, data.facts, self.from_scratch)

    def predictions(
        self, outputs: dict[str, Tensor], data: Datasets
    ) -> Iterator[dict[str, object]]:
        """Yield a line for each image, in order, with labels as in the source, and ``row``
        in a file of images.
        """
        data, test = _images(data), data.test
        origins = test.origins() if isinstance(test, ImageDataset) else repeat({})
        return class_lines(outputs, data.labels, origins)

    def open_rows(self, source: Path, others: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        """Yield the images of a folder, by name, or of a file.

        Raises DataError for one that cannot be decoded.
        """
        return open_images(source, self.columns, others)

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return a dataset that reads images batch by batch."""
        images: list[Any] = [image for (image,) in rows.records]
        return unlabeled_images(rows.file, images, _images(data).preprocessing)

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write ``labels.json`` and ``preprocessor_config.json``, which
        predictions need, and lists.
        """
        data = _images(data)
        folder.mkdir(parents=True, exist_ok=True)
        write_labels(folder, data.labels)
        data.preprocessing.save(folder)
        write_bad_rows(folder, data.bad_rows)
        write_files(folder, data.files, data.train)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, from the files of ``save``; ``None`` if there are none."""
        labels = read_labels(folder)
        return (
            None
            if labels is None
            else empty_datasets(labels, read_preprocessing(str(folder), folder))
        )


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits in fp32, shape ``(n, classes)``; autocast makes the
    model return half precision.
    """
    logits: Tensor = model(pixel_values=batch["pixel_values"]).logits.float()
    return logits


def _images(data: Datasets) -> ImageDatasets:
    if not isinstance(data, ImageDatasets):
        raise TypeError(f"expected the datasets of prepare(), found {type(data).__name__}")
    return data

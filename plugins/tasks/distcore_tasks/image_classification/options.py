"""Options of image classification: model, images and augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distcore import Direction, OnResume
from distcore_tasks.image_classification.shapes import SHAPES
from distcore_tasks.shared.classification.predictions import METRICS
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import IMAGE_PROCESSORS
from distcore_tasks.shared.schema import check_apart


@dataclass(frozen=True)
class Columns:
    """Names of the columns in files and shards."""

    image: str = "image"
    """Column of encoded images: bytes, or ``bytes`` and ``path``, as Hugging Face writes them."""
    label: str = "label"
    """Column of labels."""

    def __post_init__(self) -> None:
        """Raise ConfigError if both are one column."""
        check_apart({"columns.image": self.image, "columns.label": self.label})


@dataclass(frozen=True)
class Augment:
    """Random changes of training images, new in each epoch. Evaluation images stay unchanged."""

    shift: Annotated[float, Field(ge=0, lt=1)] = 0.125
    """Largest random shift in each direction, as a fraction of the image size; 0: none."""
    flip: bool = False
    """Mirror a random half of the images, left to right."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions(TaskOptions):
    """Options of image classification."""

    flags: ClassVar = {"image-column": "columns.image", "label-column": "columns.label"}
    built_in: ClassVar = SHAPES
    beside: ClassVar = IMAGE_PROCESSORS
    metrics: ClassVar[dict[str, Direction]] = METRICS
    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "columns": "free",
        "model": "ask",
        "augment": "ask",
    }

    model: str = "conv-tiny"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "digits"
    """Folder with a folder of images per class, files (.parquet .arrow .tar .npz),
    shards, or a dataset.
    """
    eval_data: str | dict[str, str] | None = None
    """Folder or file to evaluate on, instead of a part of ``data``. Repeated with
    names for several sets.
    """
    test_data: str | None = None
    """Folder or file for the final test; default: the evaluation rows."""
    columns: Columns = Columns()
    """Names of the columns in files and shards."""
    image_size: Annotated[int, Field(ge=8)] | Literal["auto"] = "auto"
    """Height and width in pixels, to which images are resized; auto: the model's, else that
    of arrays, else 64.
    """
    augment: Augment = Augment()
    """Augmentation of training images."""

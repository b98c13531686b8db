"""Open and check sources of images, and split their rows by class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distcore import ConfigError, DataError, Datasets, ModelError
from distcore_data import BadRows, skipping
from distcore_tasks.image_classification.arrays import check_resizing
from distcore_tasks.image_classification.dataset import AugmentedImages, ImageDataset, image_dataset
from distcore_tasks.image_classification.options import ImageOptions
from distcore_tasks.image_classification.preprocessing import Preprocessing, read_preprocessing
from distcore_tasks.image_classification.rows import Files, Images
from distcore_tasks.image_classification.sources import open_source
from distcore_tasks.image_classification.stream_sources import NumberedImages
from distcore_tasks.image_classification.streamed import (
    AugmentedStream,
    StreamedImages,
    streamed_dataset,
)
from distcore_tasks.shared.arrays import count_numbers
from distcore_tasks.shared.bad_rows import bad_rows_warnings
from distcore_tasks.shared.changed_files import File, check_files
from distcore_tasks.shared.classification.checks import check_classes
from distcore_tasks.shared.classification.heads import in_order_of_head, other_head
from distcore_tasks.shared.classification.labels import distinct_labels, encode_labels
from distcore_tasks.shared.classification.parts import LabeledPart, split_parts
from distcore_tasks.shared.mixtures import mixed_sources, source_bounds
from distcore_tasks.shared.pretrained import read_config
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.sources import check_filter, data_warnings, say_embedded
from distcore_tasks.shared.streams.preparing import check_stream
from distcore_tasks.shared.tokenized import by_field, fetching_warnings

if TYPE_CHECKING:
    from distcore import RunConfig

SIZE = 64
"""Image size in pixels of a built-in model, for images of different sizes."""
LEAST = 8
"""Minimum image size of a built-in model."""
CHANNELS = ("num_channels", "stem_num_channels")
"""Where configs of transformers have the number of channels of an image."""


Source = Images | NumberedImages
"""Images of one source, stored or streamed."""


@dataclass(frozen=True, kw_only=True)
class ImageDatasets(Datasets):
    """Images with their classes, and their preprocessing."""

    classes: tuple[str, ...]
    """Class names in the order of class numbers."""
    labels: tuple[int | str, ...]
    """The labels of the classes in the source: integers or strings."""
    preprocessing: Preprocessing
    """Preprocessing of pixels for the model."""
    bad_rows: tuple[str, ...] = ()
    """A line for each image that was passed over."""
    files: tuple[File, ...] = ()
    """The files of a stream."""


def prepare_images(options: ImageOptions, config: RunConfig) -> ImageDatasets:
    """Return the datasets of a run. Raises DataError, ModelError or ConfigError.

    Decodes every image once, to check it, unless it is streamed. The cache remembers the result.
    """
    check_filter(options)
    if options.stream:
        array = "an array is mapped into memory as it is; leave it out"
        check_stream(options, {"data": array} if options.data.endswith(".npz") else {})
    if options.data in options.embedded:
        say_embedded(options.data)
    trained = None if options.from_scratch else _read_pretrained(options)

    def rows_of(source: str) -> Source:
        is_held_out = source in options.held_out.values()
        return open_source(
            source,
            options.columns,
            options.filter,
            options.skip_bad_rows,
            stream=options.stream,
            if_large=is_held_out,
        )

    images = rows_of(options.data)
    files = images.values.rows.files() if isinstance(images, NumberedImages) else []
    check_files(files, options, config)
    preprocessing = trained or Preprocessing(size=_size(options, images))
    labels = in_order_of_head(distinct_labels(images), options)
    classes = [str(label) for label in labels]
    encode = partial(encode_labels, classes=classes)
    with skipping(options.skip_bad_rows) as bad:
        split = [*split_parts(images, classes, encode, options, config.seed, rows_of)]
    parts = {name: (part.rows, _dataset(part, preprocessing)) for name, part in split}
    for source, _ in parts.values():
        if isinstance(source, Images):
            check_resizing(source.name, source.store, preprocessing.resizing)
    bad_rows = _bad_rows((source for source, _ in parts.values()), bad)
    sets = {name: rows for name, (_, rows) in parts.items()}
    sources = _bounds(options, rows_of, sets["train"])
    return ImageDatasets(
        **by_field(
            {
                **sets,
                "train": _augmented(
                    in_order(sets["train"], options, config, sources), options, config.seed
                ),
            }
        ),
        facts={
            "data": options.data,
            "classes": classes,
            "image_size": preprocessing.size,
            **{name: _facts(rows) for name, rows in sets.items()},
        },
        warnings=(*_warnings(parts, classes, options), *bad_rows_warnings(bad_rows)),
        bad_rows=bad_rows,
        files=tuple(files),
        classes=tuple(classes),
        labels=tuple(labels),
        preprocessing=preprocessing,
    )


def empty_datasets(labels: tuple[int | str, ...], preprocessing: Preprocessing) -> ImageDatasets:
    """Return datasets with classes but no images, for building a model and predicting with it."""
    empty = Images(name="", labels=[], digests=np.empty((0, 32), np.uint8), store=Files(Path(), []))
    none = np.empty(0, np.int64)
    rows = image_dataset(empty, none, none, preprocessing)
    return ImageDatasets(
        train=rows,
        evaluation=rows,
        test=rows,
        classes=tuple(map(str, labels)),
        labels=labels,
        preprocessing=preprocessing,
    )


def _dataset(
    part: LabeledPart[Source], preprocessing: Preprocessing
) -> ImageDataset | StreamedImages:
    if isinstance(part.rows, NumberedImages):
        return streamed_dataset(part.rows, part.numbers, part.labels, preprocessing)
    assert isinstance(part.numbers, np.ndarray)
    return image_dataset(part.rows, part.numbers, part.labels[:], preprocessing)


def _bounds(
    options: ImageOptions, rows_of: Callable[[str], Source], rows: ImageDataset | StreamedImages
) -> list[int]:
    """Return the first training row of each source of a mixture, and the end of the last;
    empty without a mixture.
    """
    if isinstance(rows, StreamedImages):
        return rows.rows.bounds([Path(source).expanduser() for source in mixed_sources(options)])
    return source_bounds(options, rows_of, rows.rows, indexed=False)


def _bad_rows(sources: Iterable[Source], bad: BadRows) -> tuple[str, ...]:
    """Add the lines of all sources to ``bad``, and return all. Raises DataError
    for one too many.
    """
    for source in sources:
        for line in source.bad_rows:
            bad.pass_over(DataError(line))
    return tuple(bad.problems)


def _read_pretrained(options: ImageOptions) -> Preprocessing:
    """Return the preprocessing of a pretrained model. Raises ConfigError for an image size that
    it does not take.
    """
    folder = options.model_folder()
    settings = read_config(options.model, folder)
    channels = next((settings[key] for key in CHANNELS if settings.get(key) is not None), 3)
    if channels != 3:
        raise ModelError(
            f"model {options.model}: reads images of {channels} channel{'s' * (channels != 1)}, and"
            " every image has three here; take a model of three channels, or a task of your own"
            " (--task FILE.py:CLASS)"
        )
    preprocessing = read_preprocessing(options.model, folder)
    size = settings.get("image_size", preprocessing.size)
    if options.image_size not in ("auto", size):
        problem = f"model {options.model} takes images of {size} x {size} pixels; leave it out"
        raise ConfigError(f"image_size = {options.image_size}: {problem}")
    return preprocessing if options.image_size == "auto" else preprocessing.at(options.image_size)


def _size(options: ImageOptions, images: Source) -> int:
    if options.image_size != "auto":
        return options.image_size
    shape = images.shape if isinstance(images, Images) else None
    return SIZE if shape is None else max(*shape, LEAST)


def _augmented(
    rows: ImageDataset | StreamedImages, options: ImageOptions, seed: int
) -> ImageDataset | StreamedImages:
    if not options.augment.shift and not options.augment.flip:
        return rows
    if isinstance(rows, StreamedImages):
        return AugmentedStream(**vars(rows), augment=options.augment, seed=seed)
    return AugmentedImages(**vars(rows), augment=options.augment, seed=seed)


def _facts(rows: ImageDataset | StreamedImages) -> dict[str, object]:
    """Return the facts of one dataset for the report."""
    share = count_numbers(rows.labels).max() / len(rows)
    return {"rows": len(rows), "majority_share": round(float(share), 4)}


def _warnings(
    parts: dict[str, tuple[Source, ImageDataset | StreamedImages]],
    classes: list[str],
    options: ImageOptions,
) -> Iterator[str]:
    """Yield warnings about the sources and their classes."""
    yield from data_warnings(options)
    yield from other_head(classes, options)
    evaluation, rows = next(part for name, part in parts.items() if name.startswith("evaluation"))
    yield from fetching_warnings({name: rows for name, (_, rows) in parts.items()})
    sources = {"data": parts["train"][0], "eval_data": evaluation}
    stored = (source for source, _ in parts.values() if isinstance(source, Images))
    yield from dict.fromkeys(line for source in stored for line in source.warnings)
    counts = count_numbers(rows.labels, len(classes))
    for source, line in check_classes(
        sources["data"], counts, classes, options.eval_data is not None
    ):
        yield f"{sources[source].name}: {line}"

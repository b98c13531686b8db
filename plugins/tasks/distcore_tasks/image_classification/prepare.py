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
from distcore_tasks.image_classification.options import ImageOptions
from distcore_tasks.image_classification.preprocessing import Preprocessing, read_preprocessing
from distcore_tasks.image_classification.rows import (
    ImageDataset,
    StoredImages,
    StreamedImages,
    stored_dataset,
    streamed_dataset,
)
from distcore_tasks.image_classification.sources import open_source
from distcore_tasks.image_classification.stores import Files, Images
from distcore_tasks.image_classification.stream_sources import NumberedImages
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
"""Image size in pixels of a built-in model, where images differ in size or are streamed."""
LEAST = 8
"""Minimum image size of a built-in model."""
CHANNELS = ("num_channels", "stem_num_channels")
"""Keys of transformers' configs for the number of channels of an image."""


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
        why_not: dict[str, str | bool] = {}
        if options.data.endswith(".npz"):
            why_not["data"] = "an array is mapped into memory as it is; leave it out"
        check_stream(options, why_not)
    if options.data in options.embedded:
        say_embedded(options.data)
    # First: a model that takes other images is refused before any image is decoded.
    pretrained = None if options.from_scratch else _read_pretrained(options)

    def open_images(source: str) -> Source:
        is_held_out = source in options.held_out.values()
        return open_source(
            source,
            options.columns,
            options.filter,
            options.skip_bad_rows,
            stream=options.stream,
            if_large=is_held_out,
        )

    images = open_images(options.data)
    files: list[File] = []
    if isinstance(images, NumberedImages):
        files = images.values.rows.files()
    check_files(files, options, config)
    preprocessing = pretrained or Preprocessing(size=_size(options, images))
    labels = in_order_of_head(distinct_labels(images), options)
    classes = [str(label) for label in labels]
    encode = partial(encode_labels, classes=classes)
    with skipping(options.skip_bad_rows) as bad:
        # A list: held-out sources are opened here, where bad rows of all sources are counted.
        parts = list(split_parts(images, classes, encode, options, config.seed, open_images))
    sources: dict[str, Source] = {}
    sets: dict[str, ImageDataset] = {}
    for name, part in parts:
        sources[name] = part.rows
        sets[name] = _dataset(part, preprocessing)
    for source in sources.values():
        if isinstance(source, Images):
            check_resizing(source.name, source.store, preprocessing.resizing)
    bad_rows = _bad_rows(sources.values(), bad)

    bounds = _bounds(options, open_images, sets["train"])
    ordered = in_order(sets["train"], options, config, bounds)
    train = ordered.augmented(options.augment, config.seed)
    facts: dict[str, object] = {
        "data": options.data,
        "classes": classes,
        "image_size": preprocessing.size,
    }
    for name, rows in sets.items():
        facts[name] = _facts(rows)
    return ImageDatasets(
        **by_field({**sets, "train": train}),
        facts=facts,
        warnings=(*_warnings(sources, sets, classes, options), *bad_rows_warnings(bad_rows)),
        bad_rows=bad_rows,
        files=tuple(files),
        classes=tuple(classes),
        labels=tuple(labels),
        preprocessing=preprocessing,
    )


def empty_datasets(labels: tuple[int | str, ...], preprocessing: Preprocessing) -> ImageDatasets:
    """Return datasets with classes but no images, for building a model and predicting with it."""
    empty = Images(name="", labels=[], digests=np.empty((0, 32), np.uint8), store=Files(Path(), []))
    no_numbers = np.empty(0, np.int64)
    rows = stored_dataset(empty, no_numbers, no_numbers, preprocessing)
    return ImageDatasets(
        train=rows,
        evaluation=rows,
        test=rows,
        classes=tuple(map(str, labels)),
        labels=labels,
        preprocessing=preprocessing,
    )


def _dataset(part: LabeledPart[Source], preprocessing: Preprocessing) -> ImageDataset:
    """Return the dataset of a part, streamed or decoded as its source is."""
    if isinstance(part.rows, NumberedImages):
        return streamed_dataset(part.rows, part.numbers, part.labels, preprocessing)
    # Only a stream, whose labels are in a file, has a bit for each row.
    assert isinstance(part.numbers, np.ndarray)
    return stored_dataset(part.rows, part.numbers, part.labels[:], preprocessing)


def _bounds(
    options: ImageOptions, open_images: Callable[[str], Source], training: ImageDataset
) -> list[int]:
    """Return the first training row of each source of a mixture, and the end of the last;
    empty without a mixture.
    """
    table = training.table
    if isinstance(table, StreamedImages):
        paths = [Path(source).expanduser() for source in mixed_sources(options)]
        return table.values.bounds(paths) if paths else []
    assert isinstance(table, StoredImages)  # none of them is to be predicted
    # Not every source of decoded images has an index of its rows: folders and arrays have none.
    return source_bounds(options, open_images, table.rows, indexed=False)


def _bad_rows(sources: Iterable[Source], bad: BadRows) -> tuple[str, ...]:
    """Add the lines of all sources to ``bad``, and return its lines. Raises DataError
    for one too many.
    """
    for source in sources:
        for line in source.bad_rows:
            bad.pass_over(DataError(line))
    return tuple(bad.problems)


def _read_pretrained(options: ImageOptions) -> Preprocessing:
    """Return the preprocessing of a pretrained model. Raises ModelError for a model of other than
    three channels, and ConfigError for an image size that it does not take.
    """
    folder = options.model_folder()
    settings = read_config(options.model, folder)
    named_channels = [settings[key] for key in CHANNELS if settings.get(key) is not None]
    channels = named_channels[0] if named_channels else 3
    if channels != 3:
        plural = "" if channels == 1 else "s"
        raise ModelError(
            f"model {options.model}: reads images of {channels} channel{plural}, and"
            " every image has three here; take a model of three channels, or a task of your own"
            " (--task FILE.py:CLASS)"
        )
    preprocessing = read_preprocessing(options.model, folder)
    size = settings.get("image_size", preprocessing.size)
    if options.image_size not in ("auto", size):
        problem = f"model {options.model} takes images of {size} x {size} pixels; leave it out"
        raise ConfigError(f"image_size = {options.image_size}: {problem}")
    if options.image_size == "auto":
        return preprocessing
    return preprocessing.at(options.image_size)


def _size(options: ImageOptions, images: Source) -> int:
    """Return the image size of a built-in model: the option's, or else that of the images."""
    if options.image_size != "auto":
        return options.image_size
    # The size of streamed images is not known before they are decoded.
    if isinstance(images, NumberedImages) or images.shape is None:
        return SIZE
    height, width = images.shape
    return max(height, width, LEAST)


def _facts(rows: ImageDataset) -> dict[str, object]:
    """Return the facts of one dataset for the report."""
    rows_of_majority = count_numbers(rows.labels).max()
    majority_share = float(rows_of_majority / len(rows))
    return {"rows": len(rows), "majority_share": round(majority_share, 4)}


def _warnings(
    sources: dict[str, Source],
    sets: dict[str, ImageDataset],
    classes: list[str],
    options: ImageOptions,
) -> Iterator[str]:
    """Yield warnings about the sources and their classes. ``sources``: that of each of ``sets``."""
    yield from data_warnings(options)
    yield from other_head(classes, options)
    yield from fetching_warnings(sets)

    # By line: two datasets of one source would say each of its warnings twice.
    lines_of_sources: dict[str, None] = {}
    for source in sources.values():
        if isinstance(source, Images):
            lines_of_sources.update(dict.fromkeys(source.warnings))
    yield from lines_of_sources

    # Of several evaluation sets the first is checked.
    evaluation = next(name for name in sets if name.startswith("evaluation"))
    counts = count_numbers(sets[evaluation].labels, len(classes))
    is_held_out = options.eval_data is not None
    source_of_option = {"data": sources["train"], "eval_data": sources[evaluation]}
    for option, line in check_classes(sources["train"], counts, classes, is_held_out):
        yield f"{source_of_option[option].name}: {line}"

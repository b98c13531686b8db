"""Encoded images, one per row of a file, of shards or of a split, in the form of Hugging Face or as plain bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from distcore import DataError
from distcore_data import (
    Source,
    cached_folder,
    class_names,
    describe_value,
    read_records,
    row_error,
    source_digest,
    source_name,
)
from distcore_tasks.image_classification.decoding import check_images, check_pillow
from distcore_tasks.image_classification.options import Columns
from distcore_tasks.image_classification.rows import Blob, Images
from distcore_tasks.shared.classification.labels import label_problem

FORMAT = 1
"""Version of a cache entry, part of its key. Raise it when the files of an entry change."""


def open_rows(source: Source, columns: Columns) -> Images:
    """Return the images of files, shards or a split. Raises DataError, one line, with the row, counted from 1.

    Copies the images to the cache, for random access, and decodes each once.
    """
    name = source_name(source)
    check_pillow(name)
    key = hashlib.sha256(json.dumps([FORMAT, source_digest(source), columns.image, columns.label]).encode()).hexdigest()
    folder = cached_folder("images", key[:40], lambda folder: _copy(name, source, columns, folder))
    return Images(
        name=name,
        labels=json.loads((folder / "labels.json").read_text(encoding="utf-8")),
        digests=np.load(folder / "digests.npy", mmap_mode="r", allow_pickle=False),
        store=_blob(folder, source),
    )


def open_unlabeled(source: Source, columns: Columns) -> Blob:
    """Return the images of files, shards or a split without labels. Raises DataError as ``open_rows`` does."""
    name = source_name(source)
    check_pillow(name)
    key = hashlib.sha256(json.dumps([FORMAT, source_digest(source), columns.image]).encode()).hexdigest()

    def copy(folder: Path) -> None:
        images = (image for (image,) in read_records(source, {"columns.image": columns.image}))
        _write_images(name, source, images, folder)

    return _blob(cached_folder("images", key[:40], copy), source)


def _blob(folder: Path, source: Source) -> Blob:
    blob = np.memmap(folder / "images.bin", np.uint8, mode="r")
    return Blob(str(source), np.asarray(blob), np.load(folder / "offsets.npy", allow_pickle=False))


def _copy(name: str, source: Source, columns: Columns, folder: Path) -> None:
    """Write images, labels and digests to the new cache entry ``folder``."""
    words = class_names(source, columns.label)
    labels: list[object] = []

    def images() -> Iterator[object]:
        records = read_records(source, {"columns.image": columns.image, "columns.label": columns.label})
        for number, (image, label) in enumerate(records, 1):
            yield image
            if words and type(label) is int and label not in range(len(words)):
                raise row_error(
                    name,
                    number,
                    f"label {label} is out of range: the file names {len(words)} classes, 0 to {len(words) - 1}",
                )
            labels.append(words[label] if words and type(label) is int else label)
            if problem := label_problem(labels[-1], labels[0]):
                raise row_error(name, number, problem)

    _write_images(name, source, images(), folder)
    (folder / "labels.json").write_text(json.dumps(labels, ensure_ascii=False), encoding="utf-8")


def _write_images(name: str, source: Source, images: Iterable[object], folder: Path) -> None:
    """Write images and their digests, and decode each image once. Raises DataError for an invalid one."""
    offsets = [0]
    with (folder / "images.bin").open("wb") as blob:
        for number, image in enumerate(images, 1):
            content = image.get("bytes") if isinstance(image, dict) else image
            if not isinstance(content, bytes) or not content:
                raise row_error(name, number, f"image is {_described(image)}, expected the bytes of an encoded image")
            offsets.append(offsets[-1] + blob.write(content))
    if len(offsets) == 1:
        raise DataError(f"{name}: holds no rows")
    np.save(folder / "offsets.npy", np.asarray(offsets, np.int64))
    store = _blob(folder, source)
    try:
        np.save(folder / "digests.npy", check_images(len(store), store.encoded, store.places))
    except ValueError as error:
        raise DataError(f"{name}, {error}") from None


def _described(image: object) -> str:
    if isinstance(image, dict) and image.get("path"):
        return f"the path {image['path']!r} alone"
    return "empty" if image == b"" else describe_value(image)

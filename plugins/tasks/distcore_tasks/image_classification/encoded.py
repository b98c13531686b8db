"""Encoded images, one per row of a file, of shards or of a split, in the form of Hugging Face or as plain bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from distcore import DataError
from distcore_data import (
    BadRows,
    Source,
    cached_folder,
    class_names,
    describe_value,
    read_records,
    row_error,
    skipping,
    source_digest,
    source_name,
)
from distcore_tasks.image_classification.decoding import check_images, check_pillow, valid_images
from distcore_tasks.image_classification.options import Columns
from distcore_tasks.image_classification.rows import Blob, Images
from distcore_tasks.shared.classification.labels import label_problem

FORMAT = 2
"""Version of a cache entry, part of its key. Raise it when the files of an entry change."""
BAD_ROWS = "bad_rows.json"
"""File of a cache entry with a line for each image that was passed over."""


def open_rows(source: Source, columns: Columns, most_bad_rows: int) -> Images:
    """Return the images of files, shards or a split. Raises DataError, one line, with the row, counted from 1.

    Copies the images to the cache, for random access, and decodes each once.
    """
    name = source_name(source)
    check_pillow(name)
    key = hashlib.sha256(json.dumps([FORMAT, source_digest(source), columns.image, columns.label]).encode()).hexdigest()
    folder = cached_folder("images", key[:40], lambda folder: _copy(name, source, columns, most_bad_rows, folder))
    return Images(
        name=name,
        labels=json.loads((folder / "labels.json").read_text(encoding="utf-8")),
        digests=np.load(folder / "digests.npy", mmap_mode="r", allow_pickle=False),
        store=_blob(folder, source),
        bad_rows=tuple(json.loads((folder / BAD_ROWS).read_text(encoding="utf-8"))),
    )


def open_unlabeled(source: Source, columns: Columns) -> Blob:
    """Return the images of files, shards or a split without labels. Raises DataError as ``open_rows`` does."""
    name = source_name(source)
    check_pillow(name)
    key = hashlib.sha256(json.dumps([FORMAT, source_digest(source), columns.image]).encode()).hexdigest()

    def copy(folder: Path) -> None:
        images = (image for (image,) in read_records(source, {"columns.image": columns.image}))
        with skipping(0) as bad:
            _write_images(name, source, images, folder, bad)

    return _blob(cached_folder("images", key[:40], copy), source)


def _blob(folder: Path, source: Source) -> Blob:
    blob = np.memmap(folder / "images.bin", np.uint8, mode="r")
    return Blob(str(source), np.asarray(blob), np.load(folder / "offsets.npy", allow_pickle=False))


def _copy(name: str, source: Source, columns: Columns, most_bad_rows: int, folder: Path) -> None:
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

    with skipping(most_bad_rows) as bad:
        kept = _write_images(name, source, images(), folder, bad)
    labels = [labels[row] for row in kept]
    (folder / "labels.json").write_text(json.dumps(labels, ensure_ascii=False), encoding="utf-8")
    (folder / BAD_ROWS).write_text(json.dumps([*bad.problems], ensure_ascii=False), encoding="utf-8")


def _write_images(name: str, source: Source, images: Iterable[object], folder: Path, bad: BadRows) -> list[int]:
    """Write images and their digests, and decode each image once. Return the places of the valid ones.

    Adds others to ``bad``. Raises DataError for one too many.
    """
    offsets, end, problems = list[tuple[int, int]](), 0, dict[int, str]()
    with (folder / "images.bin").open("wb") as blob:
        for image in images:
            content = image.get("bytes") if isinstance(image, dict) else image
            if not isinstance(content, bytes) or not content:
                problem = f"image is {_described(image)}, expected the bytes of an encoded image"
                if not bad.limit:
                    raise row_error(name, len(offsets) + 1, problem)
                problems[len(offsets)] = problem
                content = b""
            offsets.append((end, end := end + blob.write(content)))
    if not offsets:
        raise DataError(f"{name}: holds no rows")
    np.save(folder / "offsets.npy", np.asarray(offsets, np.int64))
    store = _blob(folder, source)
    digests, damaged = check_images(len(store), store.encoded)
    problems = dict(sorted((damaged | problems).items()))
    kept = valid_images(digests, problems, name, bad, store.places)
    np.save(folder / "digests.npy", digests[kept])
    np.save(folder / "offsets.npy", store.offsets[kept])
    return kept


def _described(image: object) -> str:
    if isinstance(image, dict) and image.get("path"):
        return f"the path {image['path']!r} alone"
    return "empty" if image == b"" else describe_value(image)

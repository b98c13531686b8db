"""Encoded images, one per row of a file, of shards or of a split, in the form of Hugging Face
or as plain bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import (
    BadRows,
    Filtered,
    IndexedRows,
    Source,
    cached_folder,
    describe_value,
    numbered_records,
    skipping,
    source_digest,
    source_name,
)
from distcore_tasks.image_classification.decoding import (
    CHUNK,
    check_images,
    check_pillow,
    valid_images,
)
from distcore_tasks.image_classification.options import Columns
from distcore_tasks.image_classification.stores import Blob, Given, Images
from distcore_tasks.shared.classification.labels import label_problem

FORMAT = 4
"""Version of a cache entry, part of its key. Raise it when the files of an entry change."""
BAD_ROWS = "bad_rows.json"
"""File of a cache entry with a line for each image that was passed over."""


def open_rows(source: Source, columns: Columns, most_bad_rows: int) -> Images:
    """Return the images of files, shards or a split.

    Raises DataError, one line, with the row, counted from 1. Copies the images to the cache, for
    random access, and decodes each once.
    """
    name = source_name(source)
    check_pillow(name)
    identity = json.dumps([FORMAT, source_digest(source), columns.image, columns.label])
    key = hashlib.sha256(identity.encode()).hexdigest()[:40]
    folder = cached_folder(
        "images", key, lambda folder: _copy(source, columns, most_bad_rows, folder)
    )
    return Images(
        name=name,
        labels=json.loads((folder / "labels.json").read_text(encoding="utf-8")),
        digests=np.load(folder / "digests.npy", mmap_mode="r", allow_pickle=False),
        store=_blob(folder, source),
        bad_rows=tuple(json.loads((folder / BAD_ROWS).read_text(encoding="utf-8"))),
    )


def open_unlabeled(source: Source, columns: Columns) -> Blob:
    """Return the images of files, shards or a split without labels.

    Raises DataError as ``open_rows`` does.
    """
    name = source_name(source)
    check_pillow(name)
    key = hashlib.sha256(
        json.dumps([FORMAT, source_digest(source), columns.image]).encode()
    ).hexdigest()

    def copy(folder: Path) -> None:
        records = numbered_records(source, {"columns.image": columns.image})
        with skipping(0) as bad:
            _write_images(
                source, ((number, image, None) for number, (image,) in records), folder, bad
            )

    return _blob(cached_folder("images", key[:40], copy), source)


def checked_images(
    source: Source, columns: Columns, others: Mapping[str, str]
) -> Iterator[tuple[Given, int, tuple[object, ...]]]:
    """Yield each image, its number and its values in ``others``, in order; after a pass in
    which all are decoded.

    Copies none: remote files are fetched ahead, and make room. Raises
    DataError as ``open_rows`` does.
    """
    check_pillow(source_name(source))
    named_columns = {"columns.image": columns.image}
    key = hashlib.sha256(
        json.dumps([FORMAT, "checked", source_digest(source), columns.image]).encode()
    ).hexdigest()

    def check(_: Path) -> None:
        records, rows = (
            numbered_records(source, named_columns, lambda record: image_problem(record[0])),
            _rows(source),
        )
        while chunk := [*islice(records, CHUNK)]:
            images = [image_bytes(image) for _, (image,) in chunk]
            for index, problem in check_images(len(chunk), images.__getitem__)[1].items():
                raise rows.problem(chunk[index][0], problem)

    cached_folder("images", key[:40], check)
    for number, (image, *values) in numbered_records(source, named_columns | dict(others)):
        yield Given(str(source), image_bytes(image)), number, tuple(values)


def have_room(source: Source) -> bool:
    """Return True unless remote files are more than the cache holds."""
    return _rows(source).have_room


def _rows(source: Source) -> IndexedRows:
    """Return all rows of a source by number."""
    return IndexedRows(source.source if isinstance(source, Filtered) else source, {}, whole=False)


def _blob(folder: Path, source: Source) -> Blob:
    blob = np.memmap(folder / "images.bin", np.uint8, mode="r")
    offsets, numbers = (
        np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("offsets", "numbers")
    )
    return Blob(str(source), np.asarray(blob), offsets, numbers)


def labeled(
    source: Source, columns: Columns, *, images: bool = True
) -> Iterator[tuple[int, object, object, str | None]]:
    """Yield the number of each row, its image, its label, and what is wrong with the label.

    Without ``images`` these are not read, and ``None``.
    """
    first: object = None
    named_columns = {"columns.label": columns.label}
    if images:
        named_columns = {"columns.image": columns.image} | named_columns
    records: Iterator[tuple[int, Any]] = numbered_records(source, named_columns)
    for number, record in records:
        image, label = record if images else (None, record[0])
        problem = label_problem(label, label if first is None else first)
        first = label if first is None and not problem else first
        yield number, image, label, problem


def image_problem(image: object) -> str | None:
    """Return the problem of a value that is no encoded image, which is not decoded; ``None`` for
    one that may be.
    """
    content = image_bytes(image)
    return (
        None if content else f"image is {_described(image)}, expected the bytes of an encoded image"
    )


def image_bytes(image: object) -> bytes:
    """Return the bytes of an encoded image, plain or in the form of Hugging Face;
    none for other values.
    """
    content = image.get("bytes") if isinstance(image, dict) else image
    return content if isinstance(content, bytes) else b""


def _copy(source: Source, columns: Columns, most_bad_rows: int, folder: Path) -> None:
    """Write images, labels and digests to the new cache entry ``folder``."""
    labels: list[object] = []
    _rows(source).check_room(
        "the cache copies the images of", "--stream true reads them as they come"
    )

    def images() -> Iterator[tuple[int, object, str | None]]:
        for number, image, label, problem in labeled(source, columns):
            labels.append(label)
            yield number, image, problem

    with skipping(most_bad_rows) as bad:
        valid_rows = _write_images(source, images(), folder, bad)
    labels = [labels[row] for row in valid_rows]
    (folder / "labels.json").write_text(json.dumps(labels, ensure_ascii=False), encoding="utf-8")
    (folder / BAD_ROWS).write_text(
        json.dumps([*bad.problems], ensure_ascii=False), encoding="utf-8"
    )


def _write_images(
    source: Source,
    images: Iterable[tuple[int, object, str | None]],
    folder: Path,
    bad: BadRows,
) -> list[int]:
    """Write images and their digests, decode each once, and return the numbers of the valid ones.

    ``images``: the number of each row, its image, and another problem of the row. Adds the invalid
    ones to ``bad``. Raises DataError for one too many.
    """
    rows = _rows(source)
    offsets: list[tuple[int, int]] = []
    numbers: list[int] = []
    problems: dict[int, str] = {}
    with (folder / "images.bin").open("wb") as blob:
        for number, image, problem_of_row in images:
            problem = image_problem(image) or problem_of_row
            if problem and not bad.limit:
                raise rows.problem(number, problem)
            if problem:
                problems[len(offsets)] = problem
            start = blob.tell()
            blob.write(image_bytes(image))
            offsets.append((start, blob.tell()))
            numbers.append(number)
    if not offsets:
        raise DataError(f"{source_name(source)}: holds no rows")
    np.save(folder / "offsets.npy", np.asarray(offsets, np.int64))
    np.save(folder / "numbers.npy", np.asarray(numbers, np.int64))
    store = _blob(folder, source)
    digests, damaged = check_images(len(store), store.encoded)
    # In the order of rows: the error names the first one.
    problems = dict(sorted((damaged | problems).items()))

    def error(image: int, problem: str) -> DataError:
        return rows.problem(numbers[image], problem)

    valid = valid_images(digests, problems, bad, error, store.places)
    np.save(folder / "digests.npy", digests[valid])
    np.save(folder / "offsets.npy", store.offsets[valid])
    np.save(folder / "numbers.npy", store.numbers[valid])
    return valid


def _described(image: object) -> str:
    if isinstance(image, dict) and image.get("path"):
        return f"the path {image['path']!r} alone"
    return "empty" if image == b"" else describe_value(image)

"""Open sources of images: folders, files, shards, splits of datasets, and embedded datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distcore import DataError
from distcore_data import Filtered, Source, Split, check_source, data_format
from distcore_tasks.image_classification import arrays, encoded, folders
from distcore_tasks.image_classification.arrays import EMBEDDED
from distcore_tasks.image_classification.options import Columns
from distcore_tasks.image_classification.stores import Images, Store
from distcore_tasks.image_classification.stream_sources import NumberedImages, open_stream
from distcore_tasks.shared.options import Filter
from distcore_tasks.shared.sources import ALL, source_file

FILES, SHARDS = (".parquet", ".arrow", ".tar"), ("MDS", "litdata")
"""Formats whose rows may hold an encoded image: of files, and of folders with an index."""
KNOWN = (
    f"a folder of images, {', '.join(FILES)}, .npz, or a folder of {' or '.join(SHARDS)} or"
    " save_to_disk"
)


def open_source(
    source: str,
    columns: Columns,
    rows: Filter = ALL,
    most_bad_rows: int = 0,
    *,
    stream: bool = False,
    if_large: bool = False,
) -> Images | NumberedImages:
    """Return the images of ``source`` that ``rows`` keeps. Raises DataError, one line.

    Decodes each once, but none of a ``stream`` unless at most ``most_bad_rows`` that cannot be
    read are passed over.
    ``if_large``: remote files that the cache does not hold are a stream, too.
    """
    if source in EMBEDDED:
        return EMBEDDED[source]()
    path = source_file(source, EMBEDDED, rows)
    if isinstance(path, Path) and (images := _image_folders(path)):
        return folders.open_folder(images, most_bad_rows, decodes=not stream or most_bad_rows > 0)
    if has_columns(path) and (stream or (if_large and not encoded.have_room(path))):
        return open_stream(path, columns, most_bad_rows)
    if has_columns(path):
        return encoded.open_rows(path, columns, most_bad_rows)
    if isinstance(path, Filtered):
        raise DataError(
            f"data {path.source}: has no columns, so filter.column is for {', '.join(FILES)} and"
            " splits"
        )
    assert isinstance(path, Path)  # a split has columns
    with _array(path):
        return arrays.open_npz(path, most_bad_rows)


def open_unlabeled(source: Path | Split, columns: Columns) -> Store:
    """Return the images of a folder, file or split without labels, after decoding
    all once. Raises DataError.
    """
    if has_columns(source):
        return encoded.open_unlabeled(source, columns)
    assert isinstance(source, Path)  # a split has columns
    if source.is_dir():
        return folders.open_unlabeled(source)
    with _array(source):
        return arrays.open_unlabeled(source)


def has_columns(source: Source) -> bool:
    """Return True for rows of which a column is the image.

    A folder with folders or images in it has images as files, whatever else lies there.
    """
    if isinstance(source, Filtered):
        return has_columns(source.source)
    if isinstance(source, Split):
        return True
    kind = data_format(source)
    return kind in SHARDS or (kind in FILES and not (source.is_dir() and _has_images(source)))


def _image_folders(path: Path) -> list[Path]:
    """Return the folders of images that a path names. Raises DataError if it names
    something else beside them.
    """
    named = folders.named_paths(path)
    images = [folder for folder in named if folder.is_dir() and not has_columns(folder)]
    if images and (other := next((one for one in named if one not in images), None)):
        problem = (
            "is no folder of images, as others are" if other.exists() else "no such folder or file"
        )
        raise DataError(f"data {other}: {problem}")
    return images


def _has_images(folder: Path) -> bool:
    visible = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return any(entry.is_dir() or entry.suffix.lower() in folders.SUFFIXES for entry in visible)


@contextmanager
def _array(path: Path) -> Iterator[None]:
    """Raise DataError for a file that is not an array or cannot be read."""
    if not path.is_file():
        if path.exists():
            check_source(path)  # which says what a pipe cannot have
        raise DataError(f"data {path}: no such folder or file")
    if path.suffix.lower() != ".npz":
        raise DataError(f"data file {path}: unknown extension {path.suffix!r} (expected {KNOWN})")
    try:
        yield
    except OSError as error:
        raise DataError(f"data file {path}: cannot be read: {error.strerror or error}") from None

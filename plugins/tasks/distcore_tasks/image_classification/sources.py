"""Open sources of images: folders, files, splits of datasets, and embedded datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distcore import DataError
from distcore_data import Filtered, Split
from distcore_tasks.image_classification import arrays, encoded, folders
from distcore_tasks.image_classification.arrays import EMBEDDED
from distcore_tasks.image_classification.options import Columns
from distcore_tasks.image_classification.rows import Images, Store
from distcore_tasks.shared.options import Filter
from distcore_tasks.shared.sources import ALL, source_file

KNOWN = "a folder of images, .parquet, .npz, or a folder of save_to_disk"


def open_source(source: str, columns: Columns, rows: Filter = ALL) -> Images:
    """Return the images of ``source`` that ``rows`` keeps, after decoding each once. Raises DataError, one line."""
    if source in EMBEDDED:
        return EMBEDDED[source]()
    path = source_file(source, EMBEDDED, rows)
    if isinstance(path, Filtered):
        if isinstance(path.source, Path) and path.source.suffix.lower() != ".parquet":
            raise DataError(f"data {path.source}: has no columns, so filter.column is for .parquet and splits")
        return encoded.open_rows(path, columns)
    if isinstance(path, Split):
        return encoded.open_rows(path, columns)
    if path.is_dir():
        return folders.open_folder(path)
    with _file(path) as suffix:
        return arrays.open_npz(path) if suffix == ".npz" else encoded.open_rows(path, columns)


def open_unlabeled(source: Path | Split, columns: Columns) -> Store:
    """Return the images of a folder, file or split without labels, after decoding all once. Raises DataError."""
    if isinstance(source, Split):
        return encoded.open_unlabeled(source, columns)
    if source.is_dir():
        return folders.open_unlabeled(source)
    with _file(source) as suffix:
        if suffix == ".npz":
            return arrays.open_unlabeled(source)
        return encoded.open_unlabeled(source, columns)


@contextmanager
def _file(path: Path) -> Iterator[str]:
    """Yield the extension of a file to open. Raises DataError if it is unknown, or the file is unreadable."""
    if not path.is_file():
        raise DataError(f"data {path}: no such folder or file")
    if (suffix := path.suffix.lower()) not in (".parquet", ".npz"):
        raise DataError(f"data file {path}: unknown extension {path.suffix!r} (expected {KNOWN})")
    try:
        yield suffix
    except OSError as error:
        raise DataError(f"data file {path}: cannot be read: {error.strerror or error}") from None

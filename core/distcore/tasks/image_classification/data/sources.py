"""Where images come from: a folder, a file, a split of a data set, or a data set that comes with the task."""

from __future__ import annotations

from pathlib import Path

from distcore.data.splits import Split
from distcore.errors import DataError
from distcore.tasks.image_classification.data.arrays import EMBEDDED, open_npz
from distcore.tasks.image_classification.data.encoded import open_rows
from distcore.tasks.image_classification.data.folders import open_folder
from distcore.tasks.image_classification.data.images import Images
from distcore.tasks.image_classification.options import Columns
from distcore.tasks.sources import source_file

KNOWN = "a folder with a folder of images per class, .parquet, .npz, or a folder of save_to_disk"


def open_source(source: str, columns: Columns) -> Images:
    """Return the images that ``source`` names, all of which could be decoded; raises DataError, one line."""
    if source in EMBEDDED:
        return EMBEDDED[source]()
    path = source_file(source, EMBEDDED)
    if isinstance(path, Split):
        return open_rows(path, columns)
    if path.is_dir():
        return open_folder(path)
    if not path.is_file():
        raise DataError(f"data {source}: no such folder or file")
    return _open_file(path, columns)


def _open_file(path: Path, columns: Columns) -> Images:
    suffix = path.suffix.lower()
    if suffix not in (".parquet", ".npz"):
        raise DataError(f"data file {path}: unknown extension {path.suffix!r} (expected {KNOWN})")
    try:
        return open_npz(path) if suffix == ".npz" else open_rows(path, columns)
    except OSError as error:
        raise DataError(f"data file {path}: cannot be read: {error.strerror or error}") from None

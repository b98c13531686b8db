"""Rows of files and folders, whatever their format."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import numpy as np

from distcore import DataError
from distcore_data.formats.columns import Columns, Record, until_cut
from distcore_data.formats.format import FolderFormat, Format, Rows
from distcore_data.formats.installed import format_at, shard_format
from distcore_data.formats.places import START, Place


def take_rows(
    form: Format | None,
    path: Path,
    file: Path,
    columns: Columns,
    places: np.ndarray,
    rows: np.ndarray,
    shard: int,
) -> list[Record] | None:
    """Return some rows at once, ascending, of a format that has them so; ``None`` for others, and
    if one is bad.

    ``places`` are those of the file or folder ``path``. Rows of a folder are in one ``file``, the
    ``shard`` of this number.
    """
    if form is None or form.take is None:
        return None
    if isinstance(form, FolderFormat):
        return form.take(path, file, columns, shard, rows - places[shard, 0])
    at = places[:, 0].searchsorted(rows, "right") - 1
    inside, parts = rows - places[at, 0], places[at, 1]
    return form.take(file, columns, parts, inside)


def parts_of(path: Path) -> list[tuple[Path, Place]]:
    """Return the files that are read one after the other, each with the place
    where its rows begin.
    """
    folder = shard_format(path)
    if folder is None:
        return [(path, START)]
    return [(file, Place(part=number)) for number, file in enumerate(folder.files(path))]


def read_rows(
    path: Path,
    columns: Columns,
    place: Place = START,
    wanted: Container[int] | None = None,
    form: Format | None = None,
) -> Rows:
    """Yield the rows of a file, or of a file of a folder with an index, from ``place`` on.

    An error is in the place of a row that cannot be read or lacks a column; ``SKIPPED`` may be in
    that of a row whose number in the file is not ``wanted``. ``form``: the format, if it is known.
    """
    form = form or format_at(path)
    if form is None:
        raise DataError(f"data file {path}: no reader of its format is installed")
    if isinstance(form, FolderFormat):
        return form.read_rows(path, columns, place)
    if form.read_wanted:
        return until_cut(form.read_wanted(path, columns, place, wanted))
    return until_cut(form.read_rows(path, columns, place))

"""Formats of rows: files by their extension, and folders of shards."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distcore.registry import load, offers
from distcore_data.formats.arrow_rows import read_arrow_file, take_arrow
from distcore_data.formats.blocks import OpenBlocks
from distcore_data.formats.columns import Columns, Record, RowError, until_cut
from distcore_data.formats.csv_rows import open_csv, read_csv
from distcore_data.formats.json_rows import open_json_lines, read_json, read_jsonl
from distcore_data.formats.litdata import (
    is_litdata,
    litdata_files,
    litdata_rows,
    read_litdata,
    take_litdata,
)
from distcore_data.formats.mds import is_mds, mds_files, mds_rows, read_mds, take_mds
from distcore_data.formats.opening import extension
from distcore_data.formats.parquet_rows import read_parquet, take_parquet
from distcore_data.formats.places import START, Place
from distcore_data.formats.tar_rows import read_tar
from distcore_data.formats.text_rows import (
    documents,
    has_documents,
    open_text_lines,
    read_documents,
    read_text,
)
from distcore_data.room import INDEX

Reader = Callable[[Path, Columns, Place], Iterator[Record | RowError]]


class Folder(NamedTuple):
    """A format whose rows are a whole folder."""

    is_one: Callable[[Path], bool]
    """Return True for a folder of this format."""
    read: Reader
    """Yield the rows of one file from a place on; of a folder without a listing, also those of
    the files after it.
    """
    files: Callable[[Path], Sequence[Path]]
    """Return the files with the rows."""
    rows: Callable[[Path], Sequence[int]]
    """Return the number of rows of each file."""
    listing: str | None
    """File that lists them."""


READERS: dict[str, Reader] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".txt": read_text,
    ".arrow": read_arrow_file,
    ".tar": read_tar,
}
"""File extension to the function that reads such a file, of the formats that are here."""
ANY = "files"
"""Reader of ``distcore.readers`` that reads the rows of all these formats."""
SKIPPING: dict[
    str, Callable[[Path, Columns, Place, Container[int] | None], Iterator[Record | RowError]]
] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".tar": read_tar,
    ".arrow": read_arrow_file,
}
"""Those that leave rows undecoded which are not wanted."""


BLOCKS: dict[str, OpenBlocks] = {
    ".jsonl": open_json_lines,
    ".txt": open_text_lines,
    ".csv": open_csv,
}
"""Formats whose rows are taken out of what is between two places of an index."""
TAKEN = {"MDS": take_mds, "litdata": take_litdata}
"""Functions that return some rows of a shard."""


def _ones(folder: Path) -> list[int]:
    return [1] * len(documents(folder))


SHARDS = {
    "MDS": Folder(is_mds, read_mds, mds_files, mds_rows, INDEX),
    "litdata": Folder(is_litdata, read_litdata, litdata_files, litdata_rows, INDEX),
}
"""Formats of a folder with an index of its shards."""
FOLDERS = {
    **SHARDS,
    "folders of .txt": Folder(has_documents, read_documents, documents, _ones, None),
}
"""All formats of a folder. Any but those of ``SHARDS`` only counts where no data file lies
in the folder itself.
"""


def readers() -> Mapping[str, Reader]:
    """Return the function that reads a file by its extension, also of the formats of others:
    those for which they have an entry point in ``distcore.readers``.
    """
    return READERS | {f".{name}": _read_by(name) for name in _names_of_others()}


def is_known(kind: str) -> bool:
    """Return True for the extension of a format of files."""
    return kind in READERS or is_of_others(kind)


def is_of_others(kind: str) -> bool:
    """Return True for a format that another distribution reads, from its start alone."""
    return kind not in READERS and kind.removeprefix(".") in _names_of_others()


def _names_of_others() -> list[str]:
    return [name for name in offers("readers") if name != ANY]


def _read_by(name: str) -> Reader:
    """Return what reads a file by an entry point, which is imported when the first one is read."""

    def read(path: Path, columns: Columns, place: Place) -> Iterator[Record | RowError]:
        rows: Iterator[Record] = load("readers", name).read(path, columns)
        return rows

    return read


def format_of(path: Path) -> str:
    """Return the name of the format of a file or a folder: one of ``readers`` or
    ``FOLDERS``, or another extension.
    """
    if path.is_dir():
        return next((name for name, folder in FOLDERS.items() if folder.is_one(path)), "")
    return extension(path)


def take_rows(
    path: Path,
    file: Path,
    columns: Columns,
    kind: str,
    places: np.ndarray,
    rows: np.ndarray,
    shard: int,
) -> list[Record] | None:
    """Return some rows at once, ascending, of a format that has them so; ``None`` for others, and
    if one is bad.

    ``places`` are those of the file or folder. Rows of a folder are in one ``file``, the
    ``shard`` of this number.
    """
    if kind in TAKEN:
        return TAKEN[kind](path, file, columns, shard, rows - places[shard, 0])
    if kind not in (".arrow", ".parquet"):
        return None
    at = places[:, 0].searchsorted(rows, "right") - 1
    inside, parts = rows - places[at, 0], places[at, 1]
    return (take_arrow if kind == ".arrow" else take_parquet)(file, columns, parts, inside)


def parts_of(path: Path) -> list[tuple[Path, Place]]:
    """Return the files that are read one after the other, each with the place
    where its rows begin.
    """
    folder = FOLDERS.get(format_of(path))
    if folder is None or folder.listing is None:
        return [(path, START)]
    return [(file, Place(part=number)) for number, file in enumerate(folder.files(path))]


def read_rows(
    path: Path,
    columns: Columns,
    place: Place = START,
    wanted: Container[int] | None = None,
    kind: str = "",
) -> Iterator[Record | RowError]:
    """Yield the rows of a file, or of a file of a folder with a listing, from ``place`` on.

    An error is in the place of a row that cannot be read or lacks a column; ``SKIPPED`` may be in
    that of a row whose
    number in the file is not ``wanted``. ``kind``: the format, if it is known.
    """
    name = kind or format_of(path)
    if name in FOLDERS:
        return FOLDERS[name].read(path, columns, place)
    if name in SKIPPING:
        return until_cut(SKIPPING[name](path, columns, place, wanted))
    read = READERS.get(name) or readers()[name]
    return until_cut(read(path, columns, place))

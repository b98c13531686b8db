"""What a format of rows is: of files by their extension, or of folders.

An entry point of ``distcore.readers`` names one. A reader that has no more than ``read`` and
``digest`` is a format of files that are read from their start alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcore_data.formats.blocks import OpenBlocks
from distcore_data.formats.columns import Columns, Record, RowError
from distcore_data.formats.places import Place

Rows = Iterator[Record | RowError]
"""Rows in order, and in the place of a row that cannot be used its error."""
ReadFrom = Callable[[Path, Columns, Place], Rows]
"""Yield the rows from a place on."""
Scan = tuple[int, np.ndarray]
"""Number of rows, and places, int64 ``(places, fields of Place)``."""


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """A format of files; its entry point is named like the extension, without the dot."""

    read: Callable[[Path, Columns], Iterator[Record]]
    """Yield the records of a source, as ``distcore predict`` asks for them."""
    digest: Callable[[Path], str | None]
    """Return a digest of the rows of a source."""
    read_rows: ReadFrom
    """Yield the rows of one file from a place on."""
    read_wanted: Callable[[Path, Columns, Place, Container[int] | None], Rows] | None = None
    """The same, where rows that are not wanted need not be decoded."""
    scan: Callable[[Path, io.BufferedReader], Scan] | None = None
    """Find the rows in one pass over the bytes of a file, which are decompressed."""
    scan_file: Callable[[Path], Scan] | None = None
    """Find the rows of a file that is not read from start to end."""
    open_blocks: OpenBlocks | None = None
    """Prepare to take rows out of what is between two places."""
    take: Callable[[Path, Columns, np.ndarray, np.ndarray], list[Record] | None] | None = None
    """Return rows by the numbers of their parts, and their numbers there; ``None`` if one of them
    cannot be read so.
    """
    column_names: Callable[[Path], list[str]] | None = None
    """Return the names of the columns of a file."""
    is_copied: bool = False
    """True if a row can only be reached by reading those before it."""


@dataclass(frozen=True, kw_only=True)
class FolderFormat:
    """A format whose rows are a whole folder; its entry point is named ``folder.NAME``."""

    name: str
    """Its name in messages and digests."""
    read: Callable[[Path, Columns], Iterator[Record]]
    """Yield the records of a source, as ``distcore predict`` asks for them."""
    digest: Callable[[Path], str | None]
    """Return a digest of the rows of a source."""
    is_one: Callable[[Path], bool]
    """Return True for a folder of this format."""
    read_rows: ReadFrom
    """Yield the rows of one file from a place on; of a folder without an index, also those of
    the files after it.
    """
    files: Callable[[Path], Sequence[Path]]
    """Return the files with the rows."""
    rows: Callable[[Path], Sequence[int]]
    """Return the number of rows of each file."""
    has_index: bool = False
    """True if ``index.json`` in the folder names the files. A folder without one is a source only
    where no data file lies in it.
    """
    take: Callable[[Path, Path, Columns, int, np.ndarray], list[Record] | None] | None = None
    """Return rows of one of the files, which has this number, by their numbers there; ``None`` if
    one of them cannot be read so.
    """


Format = FileFormat | FolderFormat

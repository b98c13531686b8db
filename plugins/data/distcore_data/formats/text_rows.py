"""Rows of text files: a line each, or a file each in folders that are their labels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from distcore import DataError
from distcore_data.formats.blocks import ParseLine, TakeFromBlock, rows_of_lines
from distcore_data.formats.columns import (
    Columns,
    Record,
    RowError,
    known_columns,
    position,
    required,
    row_error,
    tried,
    with_nulls,
)
from distcore_data.formats.opening import text_lines
from distcore_data.formats.places import START, Place
from distcore_data.formats.row_limit import LINE, TooLong, most_bytes, over_limit

DOCUMENT = ["text", "label", "file"]
"""Columns of a text file in a folder: its content, the folder's name, and its path below
the folder of all.
"""


def read_text(path: Path, columns: Columns, place: Place = START) -> Iterator[Record | RowError]:
    """Yield the lines of a file from ``place`` on; the only column is ``text``."""
    parse, number = text_line(path, columns), place.row
    for line_number, line in enumerate(text_lines(path, "\n", place), place.inner + 1):
        if line.strip():
            number += 1
            yield tried(partial(parse, line, number, line_number))


def text_line(path: Path, columns: Columns) -> ParseLine:
    """Return what makes the record of a line of a file. Raises DataError for another column."""
    for setting in required(columns):
        if "text" not in (setting.rpartition(".")[2], columns[setting]):
            column = setting.rpartition(".")[2]
            alone = f"data file {path}: a .txt file has texts alone, no column {column!r}"
            raise DataError(f"{alone}; a .csv or .jsonl file has both")
    there = required(columns)

    def parse(line: str, number: int, line_number: int) -> Record:
        if isinstance(line, TooLong):
            raise row_error(f"data file {path}", number, LINE())
        return with_nulls((line.rstrip("\r\n"),) * len(there), there, columns)

    return parse


def open_text_lines(path: Path, columns: Columns) -> TakeFromBlock:
    """Return what takes rows of a text file out of its blocks. Raises DataError."""
    return rows_of_lines(text_line(path, columns))


def read_documents(
    path: Path, columns: Columns, place: Place = START
) -> Iterator[Record | RowError]:
    """Yield the files of the folders in ``path``, sorted by folder and name, from ``place`` on."""
    there = known_columns(columns, DOCUMENT)
    chosen = [position(f"data folder {path}", DOCUMENT, setting, there) for setting in there]
    for file in documents(path)[place.part :]:
        if (size := file.stat().st_size) > most_bytes():
            yield row_error(f"data file {file}", 1, over_limit(size))
            continue
        values = (
            "".join(text_lines(file, "", bounded=False)),
            file.parent.name,
            str(file.relative_to(path)),
        )
        yield with_nulls((values[place] for place in chosen), there, columns)


def documents(path: Path) -> list[Path]:
    """Return the text files in the folders of ``path``."""
    folders = sorted(
        entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    return [file for folder in folders for file in sorted(folder.iterdir()) if _is_text(file.name)]


def has_documents(path: Path) -> bool:
    """Return True if a folder in ``path`` begins with a text file; a folder of many other
    files costs one look.
    """
    with os.scandir(path) as entries:
        folders = [
            entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        ]
    return any(_begins_with_text(folder) for folder in folders)


def _begins_with_text(folder: str) -> bool:
    with os.scandir(folder) as entries:
        return _is_text(
            next((entry.name for entry in entries if not entry.name.startswith(".")), "")
        )


def _is_text(name: str) -> bool:
    return name.lower().endswith(".txt") and not name.startswith(".")

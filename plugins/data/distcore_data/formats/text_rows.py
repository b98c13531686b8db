"""Rows of text files: a line each, or a file each in folders that are their labels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from distcore import DataError
from distcore_data.formats.columns import (
    Columns,
    Record,
    RowError,
    known_columns,
    position,
    required,
    row_error,
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
    for setting in required(columns):
        if "text" not in (setting.rpartition(".")[2], columns[setting]):
            column = setting.rpartition(".")[2]
            alone = f"data file {path}: a .txt file has texts alone, no column {column!r}"
            raise DataError(f"{alone}; a .csv or .jsonl file has both")
    number = place.row
    for line in text_lines(path, "\n", place):
        if line.strip():
            number += 1
            too_long = isinstance(line, TooLong)
            values = (line.rstrip("\r\n"),) * len(required(columns))
            all_values = with_nulls(values, required(columns), columns)
            yield row_error(f"data file {path}", number, LINE()) if too_long else all_values


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

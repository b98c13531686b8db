"""``distcore index``: make the index by which rows are read by number, before a run does."""

from __future__ import annotations

import argparse
from pathlib import Path

from distcore import DataError

SUMMARY = "find the rows of data files once, so that they are read by number"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "data",
        nargs="+",
        metavar="DATA",
        help=(
            "as for --data: files, a folder, a pattern, a .list file, a URL, FOLDER@SPLIT; what is"
            " indexed stays so"
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    """Index each source, and print what it has. Raises DataError, one line."""
    from distcore_data.files import check_source, indexed_files, source_name
    from distcore_data.indexes.entries import index_folder
    from distcore_data.indexes.rows import IndexedRows
    from distcore_data.indexes.workers import index_files
    from distcore_data.splits import find_split

    for name in arguments.data:
        source = find_split(name) or Path(name).expanduser()
        check_source(source)
        files = indexed_files(source)
        indexes, made = index_files(files)
        size = sum(index.size for index in indexes)
        del indexes  # which may hold the places of very many rows
        rows = len(IndexedRows(source, {}))
        if not rows:
            raise DataError(f"{source_name(source)}: holds no rows")
        files_now = (
            f"{len(files)} {'file' if len(files) == 1 else 'files'}, of which {made} are"
            " indexed now"
        )
        print(f"{source_name(source)}: {rows:,} rows, {size:,} bytes in {files_now}")
    print(f"the index is in {index_folder()}")
    return 0

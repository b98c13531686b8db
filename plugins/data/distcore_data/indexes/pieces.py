"""Parquet files with large row groups, copied once to the cache as Arrow batches, which
are read by number.

To read a row of a Parquet file, its row group is decoded up to it. A copy has the columns that are
asked for. It takes
``room`` as copies of remote files do: those that were not opened for the longest time make room.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import room
from distcore_data.cache import cache_root
from distcore_data.formats.arrow_columns import DECODED_ROWS
from distcore_data.formats.columns import Columns, RowError
from distcore_data.formats.parquet_rows import parquet_batches
from distcore_data.formats.places import Place
from distcore_data.indexes.entries import FileIndex

FORMAT = 2
"""Version of a copy, part of its key. Raise it when what is in one changes."""
LARGE = 2**14
"""Rows of a group from which on a file is copied."""


def is_large(index: FileIndex) -> bool:
    """Return True for a Parquet file with a group of many rows."""
    starts = [*index.places[:, 0].tolist(), index.rows]
    return bool(np.diff(starts).max(initial=0) > LARGE)


def piece_places(rows: int) -> np.ndarray:
    """Return the places of a copy, int64 ``(batches, fields of Place)``."""
    starts = np.arange(0, rows, DECODED_ROWS)
    places = np.zeros((len(starts), len(Place._fields)), np.int64)
    places[:, 0], places[:, 1] = starts, np.arange(len(starts))
    return places


def copied(file: Path, digest: str, columns: tuple[tuple[str, str], ...]) -> Path | None:
    """Return the copy of a file with this digest, made if it is missing; ``None``
    if a group is damaged.

    Raises DataError.
    """
    copy = _copied(file, digest, columns)
    if copy and not copy.is_file():  # another run made room
        _copied.cache_clear()
        copy = _copied(file, digest, columns)
    return copy


@lru_cache(maxsize=1024)
def _copied(file: Path, digest: str, columns: tuple[tuple[str, str], ...]) -> Path | None:
    from filelock import FileLock

    key = sha256(
        repr((FORMAT, digest, sorted({name for _, name in columns}))).encode()
    ).hexdigest()[:40]
    copy = _folder() / f"{key}.arrow"
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        draft = room.draft_of(copy)
        with FileLock(draft.with_name(f"{draft.name}{room.LOCK}")):
            if not copy.is_file():
                _write(copy, parquet_batches(file, dict(columns)))
            os.utime(copy, ns=(time.time_ns(), copy.stat().st_mtime_ns))
            room.HELD[copy] = 1  # as long as this process is there
    except RowError:  # the reader says so, of the rows of this group alone
        return None
    except OSError as error:
        hint = "set DISTCORE_CACHE to a folder that can be written"
        raise DataError(f"cache folder {cache_root()}: {error.strerror or error}; {hint}") from None
    return copy


def _folder() -> Path:
    return room.copies_folder() / "pieces"


def _reserve(copy: Path, size: int, has: int) -> int:
    """Take room for so many bytes of a copy, and return them. Raises DataError if this
    process reads too many.
    """
    mine = sum(
        one.stat().st_size for one in [*room.HELD] if one.parent == copy.parent and one.is_file()
    )
    limit = room.most_copied()
    if mine + size > limit:
        what = (
            f"row groups of more than {LARGE} rows are copied, and the copies of a run take more"
            f" than {limit} bytes"
        )
        raise DataError(
            f"cache folder {cache_root()}: {what}; raise {room.LIMIT}, or write smaller groups"
        )
    room.reserve(copy, size, has)
    return size


def asked(columns: Columns) -> tuple[tuple[str, str], ...]:
    """Return columns as a key."""
    return tuple(columns.items())


def _write(copy: Path, batches: Iterable[Any]) -> None:
    """Write a draft of batches of ``DECODED_ROWS`` rows, of which one is in
    memory, and rename it.
    """
    import pyarrow as pa

    draft, taken, writer = room.draft_of(copy), 0, None
    draft.touch()
    try:
        with draft.open("r+b") as file:
            left: list[Any] = []
            for batch in batches:
                writer = writer or pa.ipc.new_file(file, batch.schema)
                table = pa.Table.from_batches([*left, batch])
                whole = len(table) // DECODED_ROWS * DECODED_ROWS
                taken = _reserve(copy, max(taken, file.tell() + table.nbytes), taken)
                for start in range(0, whole, DECODED_ROWS):
                    writer.write_table(table.slice(start, DECODED_ROWS).combine_chunks())
                left = table.slice(whole).to_batches()
            if not writer:
                return
            if left:
                writer.write_table(pa.Table.from_batches(left).combine_chunks())
            writer.close()
            taken = _reserve(copy, file.tell(), taken)
        draft.rename(copy)
        taken = 0
    finally:
        draft.unlink(missing_ok=True)
        if taken:
            room.give_back(taken)

"""Parquet files with large row groups, copied once to the cache as Arrow batches, which are read by number.

To read a row of a Parquet file, its row group is decoded up to it. A copy has the columns that are asked for. All
copies together are bounded: those that were not opened for the longest time make room.
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
from distcore_data.cache import byte_setting, cache_root
from distcore_data.formats.arrow_columns import DECODED_ROWS
from distcore_data.formats.columns import Columns, RowError
from distcore_data.formats.parquet_rows import parquet_batches
from distcore_data.formats.places import Place
from distcore_data.indexes.entries import FileIndex
from distcore_data.room import BYTES, LIMIT

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
    """Return the copy of a file with this digest, made if it is missing; ``None`` if a group is damaged.

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

    key = sha256(repr((digest, sorted({name for _, name in columns}))).encode()).hexdigest()[:40]
    copy = cache_root() / "pieces" / f"{key}.arrow"
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{copy}.lock"):
            if not copy.is_file():
                _write(copy, parquet_batches(file, dict(columns)))
            os.utime(copy, ns=(time.time_ns(), copy.stat().st_mtime_ns))
            _OPENED.add(copy)
    except RowError:  # the reader says so, of the rows of this group alone
        return None
    except OSError as error:
        hint = "set DISTCORE_CACHE to a folder that can be written"
        raise DataError(f"cache folder {cache_root()}: {error.strerror or error}; {hint}") from None
    return copy


_OPENED = set[Path]()
"""Copies that this process reads."""


def _make_room(draft: Path) -> None:
    """Remove copies until there is room for one more. Raises DataError if only those are left that are read."""
    others = {copy: copy.stat() for copy in draft.parent.glob("[!.]*.arrow") if copy not in _OPENED}
    mine = sum(copy.stat().st_size for copy in _OPENED if copy.is_file())
    limit = byte_setting(LIMIT, BYTES)
    left = limit - draft.stat().st_size - mine
    if left < 0:
        what = f"row groups of more than {LARGE} rows are copied, and the copies of a run take more than {limit} bytes"
        raise DataError(f"cache folder {cache_root()}: {what}; raise {LIMIT}, or write smaller groups")
    left -= sum(stat.st_size for stat in others.values())
    for copy in sorted(others, key=lambda copy: others[copy].st_atime):
        if left < 0:
            copy.unlink(missing_ok=True)
            left += others[copy].st_size


def asked(columns: Columns) -> tuple[tuple[str, str], ...]:
    """Return columns as a key."""
    return tuple(columns.items())


def _write(copy: Path, batches: Iterable[Any]) -> None:
    """Write a draft of batches of ``DECODED_ROWS`` rows, of which one is in memory, and rename it."""
    import pyarrow as pa
    from filelock import FileLock

    draft, writer = copy.with_name(f".{copy.name}-{os.getpid()}"), None
    try:
        left: list[Any] = []
        for batch in batches:
            writer = writer or pa.ipc.new_file(str(draft), batch.schema)
            table = pa.Table.from_batches([*left, batch])
            whole = len(table) // DECODED_ROWS * DECODED_ROWS
            for start in range(0, whole, DECODED_ROWS):
                writer.write_table(table.slice(start, DECODED_ROWS).combine_chunks())
            left = table.slice(whole).to_batches()
        if writer:
            if left:
                writer.write_table(pa.Table.from_batches(left).combine_chunks())
            writer.close()
            with FileLock(copy.with_name(".room.lock")):
                _make_room(draft)
                draft.rename(copy)
    finally:
        draft.unlink(missing_ok=True)

"""Shards that begin with the offsets of their rows, as mosaicml-streaming and litdata write them.

Such a file has the number of rows and, one more than rows, the offset of each and of the end: 32
bits each, the lowest byte first. A row has the sizes of those values that have no fixed size, then
the values.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data.formats import (
    BROKEN,
    INDEX,
    FileState,
    RowError,
    broken,
    most_bytes,
    need_pyarrow,
    open_bytes,
    over_limit,
    pass_over,
    reason,
    row_error,
    state_of,
)

NEAR = 16
"""Rows whose offsets are read together."""
AGAIN = "write or fetch the shard again"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of rows."""

    path: Path
    """The file."""
    compression: str
    """``gz`` or ``zstd``, or nothing."""
    rows: int
    """Number of rows that the index says."""
    size: int
    """Number of bytes that the index says, decompressed."""


def read_index(folder: Path) -> Mapping[str, Any]:
    """Return the content of the index of ``folder``; nothing if it has none that is an object."""
    try:
        return _parsed(folder, index_state(folder))
    except (OSError, ValueError):
        return {}


def index_state(folder: Path) -> FileState:
    """Return what changes with the index of ``folder``. Raises OSError."""
    return state_of(f"{folder}/{INDEX}")  # a path joined by pathlib takes longer


@lru_cache(maxsize=8)  # of many shards it is long, and each shard asks for it
def _parsed(folder: Path, state: FileState) -> Mapping[str, Any]:
    index = json.loads((folder / INDEX).read_bytes())
    return index if isinstance(index, dict) else {}


@contextmanager
def using_index(folder: Path) -> Iterator[None]:
    """Raise DataError, one line, where the index of ``folder`` lacks what it is asked for."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"data folder {folder}: {INDEX} cannot be used: {type(error).__name__} {error}"
        ) from None


def check_shards(folder: Path, names: Sequence[str]) -> None:
    """Raise DataError for two shards of one name, and for a name that leads out of the folder."""
    for name, times in Counter(names).items():
        if times > 1:
            raise DataError(f"data folder {folder}: {INDEX} names the shard {name} twice")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(
                f"data folder {folder}: {INDEX} names the shard {name}, which is not in the folder"
            )


def shard_rows(shard: Shard, first: int = 0) -> Iterator[bytes | RowError]:
    """Yield the bytes of each row from ``first`` on, one after the other; an error for
    one over the limit.

    Raises DataError with the row, counted from 1.
    """
    name, number, most = f"data file {shard.path}", first + 1, most_bytes()
    if shard.compression == "zstd":
        need_pyarrow(name)
    try:
        with open_bytes(shard.path, shard.compression) as file:
            for size in _to_row(file, shard, first):
                if size > most:
                    pass_over(file, size)
                    yield row_error(name, number, over_limit(size))
                else:
                    yield read_exactly(file, size)
                number += 1
            number -= 1
            if number == shard.rows and file.read(1):
                raise ValueError(f"goes on after the {shard.size} bytes that {INDEX} says; {AGAIN}")
    except FileNotFoundError:
        raise DataError(f"{name}: no such file, but {INDEX} names it; fetch it") from None
    except BROKEN as error:
        raise broken(f"{name}, row {number}", error, remedy=f"; {AGAIN}") from None
    except ValueError as error:
        raise row_error(name, number, reason(error)) from None


def _to_row(file: Any, shard: Shard, first: int) -> Iterator[int]:
    """Go to a row, and yield the bytes of each from there on. All offsets are read only at the
    start of a file.
    """
    if not first or not file.seekable():
        offsets = _offsets(file, shard)
        # after the offsets is what the writer says of the columns, and other rows
        pass_over(file, int(offsets[first]) - 4 - 4 * len(offsets))
        yield from np.diff(offsets[first:]).tolist()
        return
    for begin in range(first, shard.rows, NEAR):
        end = min(begin + NEAR, shard.rows)
        file.seek(4 + 4 * begin)
        offsets = np.frombuffer(read_exactly(file, 4 * (end - begin + 1)), "<u4").astype(np.int64)
        if (
            offsets[0] < 8 + 4 * shard.rows
            or (np.diff(offsets) < 0).any()
            or offsets[-1] > shard.size
        ):
            raise ValueError(f"the offsets of the rows are damaged; {AGAIN}")
        file.seek(int(offsets[0]))
        yield from np.diff(offsets).tolist()


def _offsets(file: Any, shard: Shard) -> np.ndarray:
    """Return the offsets of the rows and of the end, int64. Raises ValueError if they are not
    those of the index.
    """
    (rows,) = struct.unpack("<I", read_exactly(file, 4))
    if rows != shard.rows:
        raise ValueError(f"the shard has {rows} rows, {INDEX} says {shard.rows}; {AGAIN}")
    offsets = np.frombuffer(read_exactly(file, 4 * (rows + 1)), "<u4").astype(np.int64)
    if offsets[0] < 4 + 4 * len(offsets) or (np.diff(offsets) < 0).any():
        raise ValueError(f"the offsets of the rows are damaged; {AGAIN}")
    if offsets[-1] != shard.size:
        raise ValueError(f"the shard has {offsets[-1]} bytes, {INDEX} says {shard.size}; {AGAIN}")
    return offsets


def read_exactly(file: Any, size: int) -> bytes:
    """Read so many bytes. Raises ValueError if the file ends before."""
    content: bytes = file.read(size)
    if len(content) < size:
        raise ValueError(
            f"the shard ends within this row: {size - len(content)} bytes are missing; {AGAIN}"
        )
    return content


def row_values(row: bytes, sizes: Sequence[int | None]) -> list[bytes]:
    """Return the bytes of each value. ``sizes``: the fixed ones, ``None`` for those in
    the row. Raises ValueError.
    """
    own = sizes.count(None)
    if len(row) < 4 * own:
        raise ValueError("it is shorter than the sizes of its values")
    given = iter(struct.unpack_from(f"<{own}I", row))
    values, start = [], 4 * own
    for size in sizes:
        end = start + (next(given) if size is None else size)
        values.append(row[start:end])
        start = end
    if start != len(row):
        raise ValueError(f"its values have {start} bytes, the row has {len(row)}")
    return values


def decoders(
    name: str,
    encodings: Mapping[str, str],
    wanted: Collection[str],
    known: Mapping[str, Callable[[bytes], object]],
) -> dict[str, Callable[[bytes], object]]:
    """Return the function that decodes each ``wanted`` column. ``encodings``: of each column.

    Raises DataError for an encoding that is not ``known``, as a pickle, whose content may run code.
    """
    for column in wanted:
        kind = encodings[column].partition(":")[0]
        if kind in ("pkl", "pickle"):
            problem = "is a pickle, which may run code when it is read, so it is not read"
            raise DataError(
                f"{name}: column {column!r} {problem}; write it as text, numbers or bytes"
            )
        if kind not in known:
            raise DataError(
                f"{name}: column {column!r} has the encoding {kind!r} (known: {', '.join(known)})"
            )
    return {column: known[encodings[column].partition(":")[0]] for column in wanted}

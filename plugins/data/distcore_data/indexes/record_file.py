"""Records in one file, by number: the values that a reader gave come back exactly.

A file begins with where each record begins, and where the last one ends: 64 bits each, the lowest
byte first. A record is JSON, and bytes, which JSON does not have, stand behind it. A record is
empty if it cannot be stored so, or is a bad row: who asks for it reads the source itself, which
says why.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from distcore_data.formats.columns import Record, RowError
from distcore_data.indexes.drafts import Draft

NUMBER = 8
"""Bytes of a position."""
AT_ONCE = 2**16
"""Positions that are in memory until they are written, and bytes in whose place they come."""
SPAN = 2**20
"""Most bytes of records, one after the other, that are read at once."""
WITH_BYTES = b"B"
"""Begins a record with bytes; then come the size of its JSON, the JSON, and the bytes."""
SIZE = struct.Struct("<Q")


def write_records(draft: Draft, count: int, rows: Iterable[Record | RowError]) -> int:
    """Write so many records to a draft; return how many ``rows`` had, which may be fewer."""
    head = NUMBER * (count + 1)
    for start in range(0, head, AT_ONCE):
        draft.write(bytes(min(AT_ONCE, head - start)))
    starts, written, end = [head], 0, head
    for record in rows:
        contents = [b""] * record.rows if isinstance(record, RowError) else [stored(record)]
        for content in contents:
            draft.write(content)
            end += len(content)
            starts.append(end)
        if len(starts) > AT_ONCE:
            draft.overwrite(NUMBER * written, _as_bytes(starts[:-1]))
            written, starts = written + len(starts) - 1, starts[-1:]
    rows_written = written + len(starts) - 1
    if rows_written <= count:
        draft.overwrite(NUMBER * written, _as_bytes(starts))
    return rows_written


def _as_bytes(positions: list[int]) -> bytes:
    return np.array(positions, "<i8").tobytes()


def take_records(file: Path, numbers: np.ndarray) -> list[Record | None]:
    """Return some records, int64, ascending; ``None`` for those that are not stored. Raises
    OSError.
    """
    opened = os.open(file, os.O_RDONLY)
    try:
        # The copies that were not read for the longest time make room. By itself, a file system
        # counts time in steps of some milliseconds.
        os.utime(opened, ns=(time.time_ns(), time.time_ns()))
        contents = [one for run in _runs(numbers.tolist()) for one in _contents(opened, *run)]
    finally:
        os.close(opened)
    return [loaded(content) if content else None for content in contents]


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first, and how many, of numbers that follow each other."""
    first, count = 0, 0
    for number in numbers:
        if count and number != first + count:
            yield first, count
            count = 0
        if not count:
            first = number
        count += 1
    if count:
        yield first, count


def _contents(opened: int, first: int, count: int) -> list[bytes]:
    """Return the bytes of records that follow each other."""
    size = NUMBER * (count + 1)
    positions = struct.unpack(f"<{count + 1}q", os.pread(opened, size, NUMBER * first))
    start = positions[0]
    if positions[-1] - start > SPAN:
        return [os.pread(opened, end - begin, begin) for begin, end in pairwise(positions)]
    block = os.pread(opened, positions[-1] - start, start)
    return [block[begin - start : end - start] for begin, end in pairwise(positions)]


def stored(record: Record) -> bytes:
    """Return the bytes of a record; none if JSON does not have one of its values."""
    contents = [value for value in record if isinstance(value, bytes)]
    if not contents:
        return _as_json(record)
    values = [None if isinstance(value, bytes) else value for value in record]
    sizes = [len(value) if isinstance(value, bytes) else None for value in record]
    head = _as_json((values, sizes))
    return b"".join([WITH_BYTES, SIZE.pack(len(head)), head, *contents]) if head else b""


def _as_json(value: object) -> bytes:
    try:
        text = _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError):
        return b""
    return text.encode("utf-8", "surrogatepass")


def loaded(content: bytes) -> Record:
    """Return the record of these bytes, which are some."""
    if not content.startswith(WITH_BYTES):
        return tuple(_DECODER.decode(content.decode("utf-8", "surrogatepass")))
    begin = len(WITH_BYTES) + SIZE.size
    [size] = SIZE.unpack_from(content, len(WITH_BYTES))
    values, sizes = _DECODER.decode(content[begin : begin + size].decode("utf-8", "surrogatepass"))
    position = begin + size
    for place, length in enumerate(sizes):
        if length is not None:
            values[place] = content[position : position + length]
            position += length
    return tuple(values)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_DECODER = json.JSONDecoder()

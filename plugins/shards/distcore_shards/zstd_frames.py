"""Chunks of litdata whose rows are compressed inside the file: some rows a frame,
or each row alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from distcore_data.formats import (
    INDEX,
    RowError,
    broken,
    most_bytes,
    need_pyarrow,
    over_limit,
    row_error,
)
from distcore_shards.row_shards import AGAIN, Shard, read_exactly, shard_rows

LEVELS = ("batch", "sample")
"""Values of ``compression_level`` in the index, for frames of several rows and of one row; either
may be left out.
"""
_ZSTD = b"\x28\xb5\x2f\xfd"
"""The first bytes of a compressed row. As the size of its first value they would be 4 GB, more
than a chunk has.
"""
_MAGIC, _VERSION = b"LDFZ01\0\0", 1
_HEADER = struct.Struct("<8sHHIII")
"""The magic number, the version, flags, the number of rows, the most rows of a frame, and
the number of frames.

Offsets of the rows follow, as if nothing was compressed and no header was there.
"""
_FRAME = struct.Struct("<IIQII")
"""First row, number of rows, place in the file, compressed size and size of a frame."""


def compressed_rows(chunk: Shard) -> Iterator[bytes | RowError]:
    """Yield the bytes of each row, or the error of one over the limit; index and chunk may
    differ in the compression.

    Raises DataError with the row, counted from 1.
    """
    name, number = f"data file {chunk.path}", 1
    need_pyarrow(name)
    import pyarrow as pa

    try:
        for row in (
            _frames(chunk) if _begins_with_magic(chunk) else map(_unpacked, shard_rows(chunk))
        ):
            yield row
            number += 1
    except (pa.ArrowException, OSError, ValueError) as error:
        raise broken(f"{name}, row {number}", error) from None


def _begins_with_magic(chunk: Shard) -> bool:
    with chunk.path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _unpacked(content: bytes | RowError) -> bytes | RowError:
    if isinstance(content, RowError) or not content.startswith(_ZSTD):
        return content
    import pyarrow as pa

    unpacked: bytes = pa.CompressedInputStream(pa.BufferReader(content), "zstd").read()
    return unpacked


def _frames(chunk: Shard) -> Iterator[bytes | RowError]:
    """Yield the rows; a frame at a time is in memory."""
    import pyarrow as pa

    most = most_bytes()
    if (size := chunk.path.stat().st_size) > chunk.size:
        raise ValueError(f"the chunk has {size} bytes, {INDEX} says {chunk.size}; {AGAIN}")
    with chunk.path.open("rb") as file:
        _, version, _, rows, _, frames = _HEADER.unpack(read_exactly(file, _HEADER.size))
        if (version, rows) != (_VERSION, chunk.rows):
            raise ValueError(f"the chunk has {rows} rows, {INDEX} says {chunk.rows}; {AGAIN}")
        offsets = np.frombuffer(read_exactly(file, 4 * (rows + 1)), "<u4").astype(np.int64)
        table = [_FRAME.unpack(read_exactly(file, _FRAME.size)) for _ in range(frames)]
        for first, count, place, packed, size in table:
            file.seek(place)
            content = pa.decompress(read_exactly(file, packed), size, codec="zstd", asbytes=True)
            ends = offsets[first : first + count + 1] - offsets[first]
            if len(ends) != count + 1 or ends[-1] != size:
                raise ValueError(f"the offsets of the rows are damaged; {AGAIN}")
            for row, (start, end) in enumerate(pairwise(ends.tolist()), first + 1):
                is_over = end - start > most
                yield (
                    row_error(f"data file {chunk.path}", row, over_limit(end - start))
                    if is_over
                    else content[start:end]
                )
        if sum(count for _, count, *_ in table) != rows:
            raise ValueError(f"the frames have fewer rows than {rows}; {AGAIN}")

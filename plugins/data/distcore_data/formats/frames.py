"""Frames of zstd files and members of gzip files: parts that are decompressed without
what stands before them.

``zstd`` and ``gzip`` write one; ``pzstd``, ``t2sz``, ``bgzip``, and files that
were joined have several.
"""

from __future__ import annotations

import io
import os
import zlib
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from distcore_data.formats.places import Place

BLOCK = 2**18
"""Bytes that are decompressed in one go."""
FRAME, SKIPPABLE = 0xFD2FB528, 0x184D2A50
"""The first 32 bits of a frame, and of one without content, whose last 4 bits may be any."""
ENDS = "Compressed file ended before the end-of-stream marker was reached"
GZIP = 16 + zlib.MAX_WBITS
"""What zlib is told to expect a member's header and sum."""


class Unpacked(io.RawIOBase):
    """The bytes of a compressed file, which notes where frames begin as it is read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Read ``file``, the open file at ``path``, from its start."""
        self._starts, self._sizes, self._left = array("q"), array("q"), memoryview(b"")
        self._blocks = self._zstd(path, file) if path.suffix.lower() == ".zst" else self._gzip(file)

    def readable(self) -> bool:
        """Return True; there is no seeking."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes."""
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = memoryview(block)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count

    def in_frames(self, places: np.ndarray) -> np.ndarray:
        """Return places with the bytes before them as those of their frame; int64
        ``(places, fields of Place)``.
        """
        starts, sizes = np.asarray(self._starts, np.int64), np.asarray(self._sizes, np.int64)
        part, frame = Place._fields.index("part"), Place._fields.index("frame")
        owners = np.searchsorted(sizes, places[:, part], "right") - 1
        placed = places.copy()
        placed[:, part] -= sizes[owners]
        placed[:, frame] = starts[owners]
        return placed

    def _begin(self, start: int, size: int) -> None:
        self._starts.append(start)
        self._sizes.append(size)

    def _zstd(self, path: Path, file: BinaryIO) -> Iterator[bytes]:
        import pyarrow as pa

        size = 0
        for start, end in pairwise([*frame_starts(path), path.stat().st_size]):
            self._begin(start, size)
            with pa.input_stream(
                io.BufferedReader(_Part(file, end - start)), compression="zstd"
            ) as opened:
                while block := opened.read(BLOCK):
                    size += len(block)
                    yield block

    def _gzip(self, file: BinaryIO) -> Iterator[bytes]:
        size, read = 0, len(block := file.read(BLOCK))
        while block:
            self._begin(read - len(block), size)
            member = zlib.decompressobj(GZIP)
            while not member.eof:
                if not block:
                    raise EOFError(ENDS)
                yield (content := member.decompress(block, BLOCK))
                size += len(content)
                block = member.unconsumed_tail
                if not block and not member.eof:
                    read += len(block := file.read(BLOCK))
            block = member.unused_data.lstrip(b"\0")  # the gzip format lets zeros follow
            while not block and (more := file.read(BLOCK)):
                read, block = read + len(more), more.lstrip(b"\0")


class _Part(io.RawIOBase):
    """The next bytes of a file, which stays open."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._file.read(min(len(buffer), self._left))
        buffer[: len(block)] = block
        self._left -= len(block)
        return len(block)


def frame_starts(path: Path) -> Iterator[int]:
    """Yield where each frame of a zstd file begins. Those without content belong to the one before.

    Only headers are read; at damage, which the decompressor names, the last frame has the rest.
    """
    with path.open("rb") as file:
        position, size = 0, path.stat().st_size
        yield position
        while position < size:
            if position and not _is_skippable(file, position):
                yield position
            end = _frame_end(file, position)
            if not position < end < size:
                return
            position = end


def _is_skippable(file: BinaryIO, position: int) -> bool:
    return _number(file, position, 4) & ~0xF == SKIPPABLE


def _frame_end(file: BinaryIO, position: int) -> int:
    """Return where the frame at ``position`` ends; ``position`` where there is none."""
    if _is_skippable(file, position):
        return position + 8 + _number(file, position + 4, 4)
    if _number(file, position, 4) != FRAME:
        return position
    told = _number(file, position + 4, 1)
    single = told >> 5 & 1
    content = (single, 2, 4, 8)[told >> 6]
    dictionary = (0, 1, 2, 4)[told & 3]
    at, last = position + 5 + (1 - single) + dictionary + content, 0
    while not last:
        header = _number(file, at, 3)
        last, kind = header & 1, header >> 1 & 3
        at += 3 + (1 if kind == 1 else header >> 3)  # of kind 1 a byte is repeated
        if at > os.fstat(file.fileno()).st_size:
            break
    return at + 4 * (told >> 2 & 1)


def _number(file: BinaryIO, position: int, size: int) -> int:
    file.seek(position)
    return int.from_bytes(file.read(size), "little")

"""One pass over a file: its digest, the number of its rows, and places from which
they can be read.
"""

from __future__ import annotations

import hashlib
import io
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distcore import DataError
from distcore_data.encodings import not_utf8
from distcore_data.formats import is_of_others, read_rows
from distcore_data.formats.arrow_rows import batch_rows
from distcore_data.formats.csv_rows import record_places
from distcore_data.formats.json_rows import has_a_row_per_line, list_rows
from distcore_data.formats.opening import BROKEN, COMPRESSED, broken, extension, open_bytes
from distcore_data.formats.parquet_rows import group_rows
from distcore_data.formats.places import EVERY, EVERY_OF_TAR, START, Place
from distcore_data.formats.row_limit import most_bytes
from distcore_data.formats.tar_rows import row_starts

BLOCK = 2**18
"""Bytes that are looked at in one go."""
LONG_LINE = b"-\n"
"""A line that is not blank."""
Scan = tuple[int, np.ndarray]
"""Number of rows, and places, int64 ``(places, fields of Place)``."""


class Scanned(NamedTuple):
    """What one pass over a file tells."""

    digest: str
    """SHA-256 of the file, in hexadecimal."""
    rows: int
    """Number of its rows."""
    places: np.ndarray
    """Some places, ascending, int64 ``(places, fields of Place)``."""
    kind: str
    """The format of its rows: ``.jsonl`` also for a ``.json`` file with a row per line."""
    unpacked: int = 0
    """Bytes of a compressed file, decompressed."""


class Hashed(io.RawIOBase):
    """A file whose bytes go into a digest as they are read, in one pass."""

    def __init__(self, file: io.RawIOBase) -> None:
        """Read ``file`` from its start."""
        self._file = file
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        """Return True; there is no seeking."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes."""
        count = self._file.readinto(buffer) or 0
        self._digest.update(memoryview(buffer)[:count])
        return count

    def digest(self) -> str:
        """Read what is left, and return the SHA-256 of the whole file, in hexadecimal."""
        while block := self._file.read(BLOCK):
            self._digest.update(block)
        return self._digest.hexdigest()


class Counted(io.RawIOBase):
    """A file whose bytes are counted as they are read."""

    def __init__(self, file: Any) -> None:
        """Read ``file`` from its start."""
        self._file, self.count = file, 0

    def readable(self) -> bool:
        """Return True; there is no seeking."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes."""
        count = self._file.readinto(buffer) or 0
        self.count += count
        return count


def scanned(file: Path) -> Scanned:
    """Return digest, rows and places of a file. Raises DataError or OSError.

    A file of a format that is none of rows has none.
    """
    kind = extension(file)
    if kind == ".json" and has_a_row_per_line(file):
        kind = ".jsonl"
    if scan := WHOLE.get(kind):
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return Scanned(digest, *scan(file), kind)
    with file.open("rb", buffering=0) as raw:
        hashed = Hashed(raw)
        stream: Any = io.BufferedReader(hashed, BLOCK)
        if kind not in SCANS:
            rows = sum(1 for _ in read_rows(file, {})) if is_of_others(kind) else 0
            return Scanned(hashed.digest(), rows, _places([START]), kind)
        if file.suffix.lower() not in COMPRESSED:
            rows, places = SCANS[kind](file, stream)
            return Scanned(hashed.digest(), rows, places, kind)
        unpacked = Counted(open_bytes(file, file=stream))
        rows, _ = SCANS[kind](file, io.BufferedReader(unpacked, BLOCK))
        # It is read from its start alone.
        return Scanned(hashed.digest(), rows, _places([START]), kind, unpacked.count)


def _places(places: Iterable[Place]) -> np.ndarray:
    return _of(array("q", chain.from_iterable(places)))


def _of(fields: array[int]) -> np.ndarray:
    return np.frombuffer(fields, np.int64).reshape(-1, len(START))


def _lines(file: Path, stream: io.BufferedReader) -> Scan:
    """Return the lines that are not blank."""
    places, rows, lines = array("q"), 0, 0
    for block, position in _line_blocks(file, stream):
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
        starts = np.append(0, ends + 1)[: len(ends) + (not block.endswith(b"\n"))]
        numbers = np.flatnonzero(_filled(file, block, starts, position == 0))
        chosen = numbers[-rows % EVERY :: EVERY]
        first = rows + np.arange(len(chosen)) * EVERY + -rows % EVERY
        some = np.column_stack([first, position + starts[chosen], lines + chosen])
        places.frombytes(some.astype(np.int64).tobytes())
        rows, lines = rows + len(numbers), lines + len(starts)
    return rows, _of(places)


def _line_blocks(file: Path, stream: io.BufferedReader) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed bytes, cut at ends of lines, and how many come before; of
    a long line ``LONG_LINE``.
    """
    left, position, dropped, most = bytearray(), 0, 0, most_bytes()
    try:
        while block := stream.read(BLOCK):
            if dropped:
                start = block.find(b"\n") + 1
                if not start:
                    dropped += len(block)
                    continue
                yield LONG_LINE, position
                position, dropped, block = position + dropped + start, 0, block[start:]
            end = block.rfind(b"\n") + 1
            if end:
                yield bytes(left) + block[:end], position
                position, left = position + len(left) + end, bytearray()
            left += block[end:]
            if len(left) > most:
                dropped, left = len(left), bytearray()
        if left or dropped:
            yield LONG_LINE if dropped else bytes(left), position
    except BROKEN as error:
        raise broken(f"data file {file}", error, "cannot be read: ") from None


def _filled(file: Path, block: bytes, starts: np.ndarray, at_start: bool) -> np.ndarray:
    """Return True for each line that is not blank, as ``str.strip`` sees it."""
    first = np.frombuffer(block, np.uint8)[starts]
    filled: np.ndarray = (first > ord(" ")) & (first < 128)
    ends = np.append(starts[1:], len(block))
    try:
        for line in np.flatnonzero(~filled).tolist():
            encoding = "utf-8-sig" if at_start and line == 0 else "utf-8"
            filled[line] = bool(block[starts[line] : ends[line]].decode(encoding).strip())
    except UnicodeDecodeError:
        raise not_utf8(file) from None
    return filled


def _records(file: Path, stream: io.BufferedReader) -> Scan:
    return _every(record_places(file, stream))


def _members(file: Path, stream: io.BufferedReader) -> Scan:
    places = (Place(row, start) for row, start in enumerate(row_starts(file, stream)))
    return _every(places, EVERY_OF_TAR)


def _every(places: Iterable[Place], every: int = EVERY) -> Scan:
    """Count the rows, and keep some of their places."""
    rows, kept = 0, array("q")
    for rows, place in enumerate(places, 1):  # noqa: B007  # their number is returned
        if place.row % every == 0:
            kept.extend(place)
    return rows, _of(kept)


def _parts(counts: Callable[[Path], list[int]]) -> Callable[[Path], Scan]:
    """Return the scan of a format that says the rows of each of its parts."""

    def scan(file: Path) -> Scan:
        ends = np.cumsum([0, *counts(file)])
        return int(ends[-1]), _places(Place(int(row), part) for part, row in enumerate(ends[:-1]))

    return scan


def _tree(file: Path) -> Scan:
    try:
        return list_rows(file), _places([Place()])
    except DataError:
        raise
    except BROKEN as error:
        raise broken(f"data file {file}", error, "cannot be read: ") from None


SCANS: dict[str, Callable[[Path, io.BufferedReader], Scan]] = {
    ".jsonl": _lines, ".txt": _lines, ".csv": _records, ".tar": _members,
}  # fmt: skip
"""File extension to the scan of such a file, decompressed."""
WHOLE: dict[str, Callable[[Path], Scan]] = {
    ".json": _tree,
    ".parquet": _parts(group_rows),
    ".arrow": _parts(batch_rows),
}
"""The same for formats that are not read from start to end."""

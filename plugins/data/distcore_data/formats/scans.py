"""The rows of a file, and some places from which they can be read."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from distcore import DataError
from distcore_data.encodings import not_utf8
from distcore_data.formats.csv_rows import record_places
from distcore_data.formats.format import Scan
from distcore_data.formats.json_rows import list_rows
from distcore_data.formats.opening import BROKEN, broken
from distcore_data.formats.places import EVERY, EVERY_OF_TAR, START, Place
from distcore_data.formats.row_limit import most_bytes
from distcore_data.formats.tar_rows import row_starts

BLOCK = 2**18
"""Bytes that are looked at in one go."""
LONG_LINE = b"-\n"
"""A line that is not blank."""


def places_of(places: Iterable[Place]) -> np.ndarray:
    """Return places as an index has them, int64 ``(places, fields of Place)``."""
    return _of(array("q", chain.from_iterable(places)))


def _of(fields: array[int]) -> np.ndarray:
    return np.frombuffer(fields, np.int64).reshape(-1, len(START))


def scan_lines(file: Path, stream: io.BufferedReader) -> Scan:
    """Return the lines of a text file that are not blank."""
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


def scan_records(file: Path, stream: io.BufferedReader) -> Scan:
    """Return the records of a CSV file."""
    return _every(record_places(file, stream))


def scan_members(file: Path, stream: io.BufferedReader) -> Scan:
    """Return the rows of a tar file."""
    places = (Place(row, start) for row, start in enumerate(row_starts(file, stream)))
    return _every(places, EVERY_OF_TAR)


def _every(places: Iterable[Place], every: int = EVERY) -> Scan:
    """Count the rows, and keep some of their places."""
    rows, kept = 0, array("q")
    for rows, place in enumerate(places, 1):  # noqa: B007  # their number is returned
        if place.row % every == 0:
            kept.extend(place)
    return rows, _of(kept)


def scan_of_parts(counts: Callable[[Path], list[int]]) -> Callable[[Path], Scan]:
    """Return the scan of a format that says the rows of each of its parts."""

    def scan(file: Path) -> Scan:
        ends = np.cumsum([0, *counts(file)])
        return int(ends[-1]), places_of(Place(int(row), part) for part, row in enumerate(ends[:-1]))

    return scan


def scan_list(file: Path) -> Scan:
    """Return the rows of a list of JSON, which is read from its start."""
    try:
        return list_rows(file), places_of([Place()])
    except DataError:
        raise
    except BROKEN as error:
        raise broken(f"data file {file}", error, "cannot be read: ") from None

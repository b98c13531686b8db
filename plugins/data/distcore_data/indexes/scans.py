"""One pass over a file: its digest, the number of its rows, and places from which
they can be read.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distcore_data.formats.installed import file_format
from distcore_data.formats.json_rows import has_a_row_per_line
from distcore_data.formats.opening import COMPRESSED, extension, open_bytes
from distcore_data.formats.places import START
from distcore_data.formats.reading import read_rows
from distcore_data.formats.scans import BLOCK, places_of


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
    form = file_format(kind)
    if form and form.scan_file:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return Scanned(digest, *form.scan_file(file), kind)
    with file.open("rb", buffering=0) as raw:
        hashed = Hashed(raw)
        stream: Any = io.BufferedReader(hashed, BLOCK)
        if form is None or form.scan is None:
            rows = sum(1 for _ in read_rows(file, {}, form=form)) if form else 0
            return Scanned(hashed.digest(), rows, places_of([START]), kind)
        if file.suffix.lower() not in COMPRESSED:
            rows, places = form.scan(file, stream)
            return Scanned(hashed.digest(), rows, places, kind)
        unpacked = Counted(open_bytes(file, file=stream))
        rows, _ = form.scan(file, io.BufferedReader(unpacked, BLOCK))
        # It is read from its start alone.
        return Scanned(hashed.digest(), rows, places_of([START]), kind, unpacked.count)

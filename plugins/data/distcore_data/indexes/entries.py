"""The index of one file, in the cache: it is made once, and again when the file has changed."""

from __future__ import annotations

import json
import os
import time
import zlib
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data.cache import cache_root
from distcore_data.fetching import is_copy
from distcore_data.formats.columns import CutError, RowError, TwiceError
from distcore_data.formats.opening import FileState, state_of, unreadable
from distcore_data.formats.places import START
from distcore_data.formats.reading import read_rows
from distcore_data.indexes.scans import scanned

FORMAT = 6
"""Version of an entry. Raise it when what is in one, or its meaning, changes."""
SETTLED = 2 * 10**9
"""Nanoseconds for which a file must have been as it is: a file system may count time in
steps of 2 s.
"""
MAPPED = 2**20
"""Bytes from which on an entry is mapped rather than read: a process may map
some ten thousand files.
"""
ALIGNED = 8
"""Bytes of which the line of facts is a multiple, so that the integers after it are aligned."""
TIMES = slice(3, 5)
"""Where the state of a file has its times."""


@dataclass(frozen=True, eq=False, slots=True)
class FileIndex:
    """The index of a file."""

    digest: str
    """SHA-256 of the file, in hexadecimal."""
    rows: int
    """Number of rows, with those that cannot be read."""
    size: int
    """Bytes of the file."""
    places: np.ndarray
    """Some places, ascending, int64 ``(places, fields of Place)``."""
    cut: str = ""
    """The error with which its rows end, after which no other ones can be read, or of a row
    with a key of another.
    """
    kind: str = ""
    """The format of its rows, as ``Scanned`` has it; nothing if the file is cut."""
    unpacked: int = 0
    """Bytes of a compressed file, decompressed."""


FACTS = tuple(field.name for field in fields(FileIndex) if field.name != "places")
"""Names of what an entry has besides the places."""


def index_folder() -> Path:
    """Return the folder of all indexes; it need not exist."""
    return cache_root() / "index"


def file_index(file: Path) -> FileIndex:
    """Return the index of a file, made in one pass over the file unless the cache
    has it. Raises DataError.
    """
    return known_index(file) or _made(file)


def known_index(file: Path) -> FileIndex | None:
    """Return the index of a file if the cache has it, and the file is what it was then."""
    try:
        state, (facts, places, crc) = _state(file), _parted(_entry(file))
        fresh = facts["state"] == state and facts["made"] - max(state[TIMES]) > SETTLED
        if not fresh or facts["sum"] != crc:
            return None
        numbers = places.view("<i8").reshape(len(START), -1).T
        told = {name: facts[name] for name in FACTS}
        return FileIndex(places=numbers, **told)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _parted(entry: Path) -> tuple[dict[str, Any], np.ndarray, int]:
    """Return the facts of an entry, and the bytes of its places with their sum."""
    if entry.stat().st_size >= MAPPED:
        return _mapped(entry, state_of(entry))
    with entry.open("rb") as opened:
        facts, places = json.loads(opened.readline()), np.frombuffer(opened.read(), np.uint8)
    return facts, places, zlib.crc32(places.data)


@lru_cache(maxsize=1024)  # a run opens its source several times, and the sum takes a pass
def _mapped(entry: Path, state: FileState) -> tuple[dict[str, Any], np.ndarray, int]:
    """Map the places, so that processes share them, and a process has those pages in
    memory that it searches.
    """
    crc = 0
    with entry.open("rb") as opened:
        head = opened.readline()
        while block := opened.read(MAPPED):
            crc = zlib.crc32(block, crc)
    return json.loads(head), np.asarray(np.memmap(entry, np.uint8, "r", len(head))), crc


def _made(file: Path) -> FileIndex:
    try:
        before, made = _state(file), time.time_ns()
        index = _scanned(file)
        if _state(file) != before:
            raise DataError(f"data file {file}: changed while it was read")
    except OSError as error:
        raise unreadable(file, error) from None
    try:
        _save(_entry(file), index, before, made)
    except OSError as error:
        hint = "set DISTCORE_CACHE to a folder that can be written"
        raise DataError(f"cache folder {cache_root()}: {error.strerror or error}; {hint}") from None
    return known_index(file) or index  # places that are mapped take no memory of this process alone


def _scanned(file: Path) -> FileIndex:
    """Return the index of a file, of a damaged one that of the rows before the damage.
    Raises DataError or OSError.
    """
    size = file.stat().st_size
    try:
        one = scanned(file)
    except RowError:
        rows, cut = 0, None
        for row in read_rows(file, {}):
            cut = row if isinstance(row, CutError | TwiceError) else cut
            rows += row.rows if isinstance(row, RowError) else 1
        if cut is None:  # the damage is no end
            raise
        with file.open("rb") as opened:
            return FileIndex(
                file_digest(opened, "sha256").hexdigest(), rows, size, np.array([START]), str(cut)
            )
    return FileIndex(one.digest, one.rows, size, one.places, kind=one.kind, unpacked=one.unpacked)


def _save(entry: Path, index: FileIndex, state: list[int], made: int) -> None:
    """Write a draft and rename it, so that a kill leaves a whole entry or none."""
    # A field of all places after the other, so that a search reads few pages of one; one at a time
    # is in memory twice.
    crc = 0
    for field in range(len(START)):
        crc = zlib.crc32(_field(index, field), crc)
    facts: dict[str, Any] = {"state": state, "made": made}
    facts |= {name: getattr(index, name) for name in FACTS}
    head = json.dumps(facts | {"sum": crc}).encode()
    entry.parent.mkdir(parents=True, exist_ok=True)
    draft = entry.with_name(f".{entry.name}-{os.getpid()}")
    try:
        with draft.open("wb") as opened:
            opened.write(head + b" " * (-(len(head) + 1) % ALIGNED) + b"\n")
            for field in range(len(START)):
                opened.write(_field(index, field))
        draft.rename(entry)
    finally:
        draft.unlink(missing_ok=True)


def _field(index: FileIndex, field: int) -> memoryview:
    return np.ascontiguousarray(index.places[:, field], "<i8").data.cast("B")


def _entry(file: Path) -> Path:
    return index_folder() / f"{sha256(os.fsencode(file.resolve())).hexdigest()[:40]}"


def _state(file: Path) -> list[int]:
    """Return what changes with a file: nobody can set its last time back. The name of a
    copy says the version.
    """
    if is_copy(file):
        return [FORMAT, 0, 0, 0, 0]
    stat = file.stat()
    return [FORMAT, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]

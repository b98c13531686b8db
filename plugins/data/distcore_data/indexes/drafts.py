"""Copies that are written into the cache: a draft takes its room as it grows, and is a copy only
when it is whole.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from distcore import DataError
from distcore_data import room
from distcore_data.cache import cache_root
from distcore_data.fetching import is_copy, shown

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BUFFER = 2**20
"""Bytes for which room is taken at a time."""
SAID = 2**26
"""Bytes of a file from which on a line says that it is copied: it takes a while."""
log = logging.getLogger("distcore")


class Draft(io.RawIOBase):
    """A file that becomes a copy; bytes are written one after the other."""

    _file = -1

    def __init__(self, copy: Path, source: Path, remedy: str) -> None:
        """Begin the draft of a copy of ``source``. ``remedy``: what to do if it is too large."""
        self._copy, self._source, self._remedy = copy, source, remedy
        self._draft = room.draft_of(copy)
        self._draft.unlink(missing_ok=True)  # of a process that was killed
        self._taken = self._written = 0
        self._buffer = bytearray()
        self._file = os.open(self._draft, os.O_RDWR | os.O_CREAT)

    def writable(self) -> bool:
        """Return True; there is no seeking."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._written + len(self._buffer)

    def write(self, content: ReadableBuffer) -> int:
        """Write some bytes. Raises DataError if there is no room for them, or OSError."""
        before = len(self._buffer)
        self._buffer += memoryview(content).cast("B")
        size = len(self._buffer) - before
        if len(self._buffer) >= BUFFER:
            self._write_buffer()
        return size

    def overwrite(self, position: int, content: bytes) -> None:
        """Write bytes in place of those at a position."""
        self._write_buffer()
        os.pwrite(self._file, content, position)

    def keep(self) -> None:
        """Make the copy of what was written."""
        self._write_buffer()
        self._draft.rename(self._copy)
        self._taken = 0

    def close(self) -> None:
        """Drop a draft that was not kept, and give its room back."""
        if self.closed or self._file < 0:
            return
        super().close()
        os.close(self._file)
        self._draft.unlink(missing_ok=True)
        if self._taken:
            room.give_back(self._taken)

    def _write_buffer(self) -> None:
        size = self.tell()
        if size > self._taken:
            self._take_room(size)
        view = memoryview(self._buffer)
        while view:
            count = os.pwrite(self._file, view, self._written)
            view, self._written = view[count:], self._written + count
        view.release()
        self._buffer = bytearray()

    def _take_room(self, size: int) -> None:
        source, most = self._source, room.most_copied()
        # A remote file is there as long as its rows are read.
        beside = source.stat().st_size if is_copy(source) else 0
        if size + beside > most:
            also = f", with its {beside} bytes," if beside else ""
            raise DataError(
                f"data file {shown(source)}: its rows are copied to be read by number, and the copy"
                f"{also} takes more than the {most} bytes of the cache {cache_root()}; raise"
                f" {room.LIMIT}, or {self._remedy}"
            )
        room.reserve(self._copy, size, self._taken)
        self._taken = size


def make_copy(copy: Path, source: Path, remedy: str, write: Callable[[Draft], None]) -> None:
    """Let ``write`` write a copy of ``source`` unless it is there: once, however many processes
    need it.

    An exception of ``write`` passes through and leaves no copy. ``remedy``: what to do with a
    source whose copy is too large. Raises DataError.
    """
    from filelock import FileLock

    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        draft_file = room.draft_of(copy)
        with FileLock(draft_file.with_name(f"{draft_file.name}{room.LOCK}")):
            if not copy.is_file():
                if source.is_file() and source.stat().st_size >= SAID:
                    log.info("data: copying %s to read its rows by number", shown(source))
                with Draft(copy, source, remedy) as draft:
                    write(draft)
                    draft.keep()
    except OSError as error:
        hint = "set DISTCORE_CACHE to a folder that can be written"
        raise DataError(f"cache folder {cache_root()}: {error.strerror or error}; {hint}") from None

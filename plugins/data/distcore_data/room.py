"""Room for copies of files: all copies together are bounded, whatever processes of a machine
fetch or make them.

Those that were not read for the longest time make room.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from distcore_data.cache import byte_setting, cache_root

LIMIT = "DISTCORE_REMOTE_BYTES"
"""Environment variable with the most bytes of all copies."""
BYTES = 100 * 2**30
"""Its default."""
INDEX = "index.json"
"""File of a folder of shards that lists them."""
ON_REMOVAL: list[Callable[[], object]] = []
"""What is called when a copy was removed."""
HELD = Counter[Path]()
"""Copies that this process reads or fetches now."""
TAKEN = ".taken"
"""File with the bytes that copies take, also those that are being fetched."""
LOCK = ".lock"
"""Extension of the file that a process locks."""
WAIT = 0.05
"""Seconds until a process looks again whether others are done with what they fetch."""


def most_copied() -> int:
    """Return the most bytes of all copies. Raises DataError for a setting that is none."""
    return byte_setting(LIMIT, BYTES)


def copies_folder() -> Path:
    """Return the folder of all copies; it need not exist."""
    return cache_root().absolute() / "remote"


def draft_of(copy: Path) -> Path:
    """Return the file of a copy that is being fetched."""
    return copy.with_name(f".{copy.name}")


def copies() -> Iterator[tuple[Path, tuple[float, int]]]:
    """Yield each copy with when it was read last, and its bytes; but the index of a folder
    of shards always stays.
    """
    for file in copies_folder().rglob("[!.]*"):
        with suppress(FileNotFoundError):  # another process makes room
            if file.is_file() and file.name != INDEX:
                stat = file.stat()
                yield file, (max(stat.st_atime, stat.st_mtime), stat.st_size)


def drafts() -> Iterator[int]:
    """Yield the bytes of each copy that is being fetched; remove what a process left
    that was killed meanwhile.
    """
    from filelock import FileLock, Timeout

    for lock in copies_folder().glob(f"*/**/.*{LOCK}"):
        draft = lock.with_name(lock.name.removesuffix(LOCK))
        with suppress(FileNotFoundError):
            size = draft.stat().st_size
            try:
                with FileLock(lock, timeout=0):
                    draft.unlink()
            except Timeout:
                yield size


@dataclass(slots=True)
class Taken:
    """What copies take."""

    bytes: int
    """Their bytes, with those that are being fetched."""


@contextmanager
def taken() -> Iterator[Taken]:
    """Hold what copies take, which no other process changes meanwhile."""
    from filelock import FileLock

    file = copies_folder() / TAKEN
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}{LOCK}"):
        told = file.read_text() if file.is_file() else ""
        total = Taken(int(told) if told.isdigit() else _counted())
        try:
            yield total
        finally:
            file.write_text(str(total.bytes))


def _counted() -> int:
    return sum(size for _, (_, size) in copies()) + sum(drafts())


def reserve(copy: Path, size: int, has: int = 0) -> None:
    """Take room for a copy, which ``has`` some already, and begin its draft or make it longer.

    Waits for what others fetch if nothing else can make room.
    """
    while not _is_reserved(copy, size, has):
        time.sleep(WAIT)


def _is_reserved(copy: Path, size: int, has: int = 0) -> bool:
    """Return False if there is no room, but will be; what this process itself holds is
    no reason to wait.
    """
    most, is_waiting = most_copied(), False
    with taken() as total:
        if total.bytes + size - has > most:
            fetched = sum(drafts()) - has
            there = sorted(copies(), key=lambda one: one[1])
            total.bytes = has + fetched + sum(other for _, (_, other) in there)
            for one, (_, other) in there:
                if total.bytes + size - has > most and one not in HELD:
                    one.unlink(missing_ok=True)
                    total.bytes -= other
            is_waiting = total.bytes + size - has > most and fetched > 0
        if not is_waiting:
            total.bytes += size - has
            with draft_of(copy).open("ab") as draft:
                draft.truncate(size)
    for forget in ON_REMOVAL:
        forget()
    return not is_waiting


def remove(copy: Path, size: int) -> None:
    """Remove a copy, which another process may have removed."""
    with taken() as total, suppress(FileNotFoundError):
        copy.unlink()
        total.bytes -= size
    for forget in ON_REMOVAL:
        forget()


def give_back(size: int) -> None:
    """Give back the room of a copy that could not be fetched."""
    with taken() as total:
        total.bytes -= size

"""Copies of remote files in the cache, of which some are fetched ahead of a reader, and dropped
when it is done.

A copy is a whole file, and ``room`` bounds all copies together. Eviction: least recently read
first; then this reader's finished files, newest first, because the next epoch starts with the
oldest.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distcore import DataError
from distcore_data import room
from distcore_data.cache import cache_root

TRIES = 4
"""Times that a file is asked for before a run ends."""
FIRST_WAIT = 1.0
"""Seconds before the second time, which double each time."""
AT_ONCE = 8
"""Files that are fetched at a time."""
BLOCK = 2**22
"""Bytes that are read at a time."""
REASON = 300
"""Largest number of characters of an error of a file system."""
FORBIDDEN = {
    401: "Unauthorized",
    403: "Forbidden",
    407: "Proxy Authentication Required",
    451: "Unavailable",
}
"""Statuses of HTTP for a file that is there, but not for everybody."""
GONE = (404, 410)
"""Statuses of HTTP for a file that is not there."""
T = TypeVar("T")
E = TypeVar("E", bound=DataError)
log = logging.getLogger("distcore")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a file system."""

    system: Any
    """The file system, of fsspec."""
    name: str
    """The name there."""
    url: str
    """What the user named."""
    size: int
    """Bytes; 0 if the file system does not say."""

    @property
    def own_url(self) -> str:
        """The URL of this file, which may be one of those in a folder that the user named."""
        scheme = self.url.partition("://")[0]
        root = "/" if scheme == "file" else ""
        return self.name if "://" in self.name else f"{scheme}://{root}{self.name.lstrip('/')}"


REMOTE: dict[Path, RemoteFile] = {}
"""What this process knows of each copy, which need not be there."""


def is_copy(file: Path) -> bool:
    """Return True for the name of a copy, which also names the version of its file."""
    return file.is_relative_to(room.copies_folder())


def of_remote(error: E, file: Path) -> E:
    """Return the error of a file; that of a copy names the remote file in its place."""
    if file in REMOTE:
        error = copy(error)
        error.args = (str(error).replace(str(file), shown(file)),)
    return error


def shown(file: Path) -> str:
    """Return the name of a file in messages; that of a copy is the URL of the remote file."""
    return REMOTE[file].own_url if file in REMOTE else str(file)


def present(files: Iterable[Path]) -> Generator[Path, None, None]:
    """Yield each file when it is there; the copies that come next are fetched meanwhile.
    Raises DataError, one line.

    A copy is there until the next one is asked for, and longer where there is room.
    """
    coming, ahead = deque(files), deque[tuple[Path, Future[None]]]()
    if not any(file in REMOTE for file in coming):
        yield from coming
        return
    looked, pool = _Room(coming), ThreadPoolExecutor(AT_ONCE)
    try:
        while coming or ahead:
            while coming and len(ahead) < AT_ONCE and looked.is_made(coming[0], alone=not ahead):
                file = coming.popleft()
                room.HELD[file] += 1
                ahead.append((file, pool.submit(_fetch, REMOTE.get(file), file)))
            file, fetch = ahead[0]
            fetch.result()
            yield file
            ahead.popleft()
            _let_go(file)
            looked.leave(file)
    finally:  # ranks are forked: no thread may be left
        # one of its own threads, which collects this generator, cannot wait for itself
        with suppress(RuntimeError):
            pool.shutdown(cancel_futures=True)
        for file, _ in ahead:
            _let_go(file)


def _let_go(file: Path) -> None:
    room.HELD[file] -= 1
    if not room.HELD[file]:
        del room.HELD[file]


class _Room:
    """Disk space of cached copies, and the copies that this reader still
    needs, in reading order.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        """Look at the copies that are there. Raises DataError."""
        self._limit = room.most_copied()
        copies = dict(room.copies())
        mine = {file for file in files if file in REMOTE}
        self._sizes = {copy: size for copy, (_, size) in copies.items()}
        self._others = sorted(set(copies) - mine, key=lambda copy: copies[copy], reverse=True)
        self._later = deque(file for file in files if file in copies)
        self._done, self._ahead = list[Path](), 0

    def is_made(self, file: Path, alone: bool) -> bool:
        """Remove copies until there is room for one more; ``alone``: also those that
        the reader needs later.

        Raises DataError for a file that is larger than all room.
        """
        remote = REMOTE.get(file)
        if remote is None:
            return True
        if remote.size > self._limit:
            raise DataError(
                f"data file {remote.url}: has {remote.size} bytes, and the cache {self._limit};"
                f" raise {room.LIMIT}"
            )
        if self._later and self._later[0] == file:
            self._later.popleft()
        if self._ahead + remote.size > self._limit // 2 and not alone:
            return False  # the other half keeps the first ones for the next time
        needed = self._limit - (0 if file in self._sizes else remote.size)
        while (total := sum(self._sizes.values())) > needed and (
            removable := self._others or self._done or (self._later if alone else deque())
        ):
            copy = removable.pop()
            room.remove(copy, self._sizes.pop(copy, 0))
        if total <= needed or alone:
            self._sizes[file], self._ahead = remote.size, self._ahead + remote.size
            return True
        return False

    def leave(self, file: Path) -> None:
        """Let a copy be removed, with which the reader is done."""
        if file in REMOTE:
            self._done.append(file)
            self._ahead -= REMOTE[file].size


def _fetch(file: RemoteFile | None, copy: Path) -> None:
    """Copy a remote file to the cache unless it is there; a draft is renamed when it is whole."""
    if file is None:
        return
    from filelock import FileLock

    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        draft = room.draft_of(copy)
        with FileLock(draft.with_name(f"{draft.name}{room.LOCK}")):
            with suppress(FileNotFoundError):  # another process may remove it right now
                os.utime(copy)
                return
            log.info("data: fetching %s", file.own_url)
            room.reserve(copy, file.size)
            try:
                persistent(file.url, lambda: _write(file, draft))
                draft.rename(copy)
                if not file.size:
                    room.give_back(-copy.stat().st_size)
            except BaseException:
                draft.unlink(missing_ok=True)
                room.give_back(file.size)
                raise
    except OSError as error:
        hint = "set DISTCORE_CACHE to a folder that can be written"
        raise DataError(f"cache folder {cache_root()}: {error.strerror or error}; {hint}") from None


def _write(file: RemoteFile, draft: Path) -> None:
    with _own(file.system).open(file.name, "rb") as source, draft.open("r+b") as target:
        shutil.copyfileobj(source, target, BLOCK)
        came = target.tell()
    if file.size and came != file.size:
        raise EOFError(f"{came} of {file.size} bytes came")


def _own(system: Any) -> Any:
    """Return a file system of this process: some refuse to work in one that was forked, as
    loaders of rows are.
    """
    if getattr(system, "_pid", None) in (None, os.getpid()):
        return system
    return type(system)(*system.storage_args, **system.storage_options)


def persistent(url: str, action: Callable[[], T]) -> T:
    """Return the result of ``action``, which is tried again where a
    network fails; raises DataError.
    """
    for attempt in range(1, TRIES + 1):
        try:
            return action()
        except FileNotFoundError as error:
            # For HTTP, fsspec raises it for each answer that is no file, also for one
            # that forbids it.
            status = _http_status(error)
            if status in FORBIDDEN:
                problem = f"may not be read: HTTP {status}, {FORBIDDEN[status]}"
                raise DataError(
                    f"data file {url}: {problem}; check the URL, and the credentials for it"
                ) from None
            if status is None or status in GONE or attempt == TRIES:
                absent = (
                    "no such file"
                    if status is None or status in GONE
                    else f"cannot be fetched: HTTP {status}"
                )
                raise DataError(f"data file {url}: {absent}") from None
            time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
        except PermissionError as error:
            raise DataError(f"data file {url}: cannot be read: {shortened(error)}") from None
        except DataError:
            raise
        except Exception as error:  # each file system has its own
            if attempt == TRIES:
                said = f"cannot be fetched, after {TRIES} attempts: {shortened(error)}"
                raise DataError(f"data file {url}: {said}") from None
            time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
    raise AssertionError


def _http_status(error: BaseException) -> int | None:
    """Return the status of the answer that an error of a file system is about;
    ``None`` for other errors.
    """
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(cause, "status", None)
        if isinstance(status, int):
            return status
        cause = cause.__cause__ or cause.__context__
    return None


def shortened(error: BaseException) -> str:
    """Return an error of a file system in one line."""
    return " ".join(f"{type(error).__name__} {error}".split())[:REASON].strip()

"""Remote files, of anything that fsspec opens, as files in the cache. fsspec is imported when the first one is named.

A file is fetched whole, once: its copy is found by URL, size and version (ETag, date), so a changed file is fetched
anew, and a resume compares the rows. Copies that were not read for the longest time make room for others.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from distcore import DataError
from distcore_data.cache import cache_root

LIMIT = "DISTCORE_REMOTE_BYTES"
"""Environment variable with the most bytes of all copies."""
BYTES = 100 * 2**30
"""Its default."""
TRIES = 4
"""Times that a file is asked for before a run ends."""
FIRST_WAIT = 1.0
"""Seconds before the second time, which double each time."""
AT_ONCE = 8
"""Files of a URL that are fetched at a time."""
BLOCK = 2**22
"""Bytes that are read at a time."""
VERSION = (
    "ETag", "etag", "Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created", "generation",
    "md5Hash", "Content-MD5", "Digest",
)  # fmt: skip
"""What file systems say about a version of a file, besides its size."""
REASON = 300
"""Largest number of characters of an error of a file system."""
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/{1,2}(?P<rest>[^/].*)")
T = TypeVar("T")
log = logging.getLogger("distcore")


def url_of(source: object) -> str | None:
    """Return the URL that a path stands for, which has lost one of its slashes; ``None`` for a local path."""
    match = _URL.fullmatch(str(source))
    return f"{match['scheme']}://{match['rest']}" if match else None


@cache  # a process sees one version of a file
def fetched(url: str, formats: Callable[[Path], bool]) -> tuple[Path, ...]:
    """Return the local copies of the files of a URL, of a folder or of a pattern, in the order of their names.

    ``formats`` says whether a file of a folder has rows. Raises DataError, one line.
    """
    system, root = _opened(url)
    infos = _persistent(url, lambda: _infos(system, url, root, formats))
    if not infos:
        raise DataError(f"data file {url}: no file has such a name")
    needed, limit = sum(int(info.get("size") or 0) for info in infos), _limit()
    if needed > limit:
        raise DataError(f"data file {url}: has {needed} bytes, and the cache {limit}; raise {LIMIT}")
    copies = [_copy_of(url, info) for info in infos]
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        fetches = [
            pool.submit(_fetch, system, str(info["name"]), url, int(info.get("size") or -1), copy)
            for copy, info in zip(copies, infos, strict=True)
        ]
        for fetch in fetches:
            fetch.result()
    finally:  # ranks are forked: no thread may be left
        pool.shutdown(cancel_futures=True)
    _make_room(limit, set(copies))
    return tuple(copies)


def _opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise DataError(f"data file {url}: needs fsspec; pip install 'distcore-data[remote]'") from None
    try:
        system, root = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError, TypeError) as error:
        raise DataError(f"data file {url}: cannot be opened: {_reason(error)}") from None
    return system, str(root)


def _infos(system: Any, url: str, root: str, formats: Callable[[Path], bool]) -> list[dict[str, Any]]:
    """Return what the file system says of each file; none for a pattern that matches nothing."""
    if url.startswith(("http://", "https://")):  # a page with links is no folder, and ? no pattern
        return [system.info(root)]
    if re.search(r"[*?\[]", root):
        return [info for _, info in sorted(system.glob(root, detail=True).items()) if info["type"] == "file"]
    info = system.info(root)
    if info["type"] != "directory":
        return [info]
    files = [one for one in system.ls(root, detail=True) if one["type"] == "file" and formats(Path(one["name"]))]
    if any(PurePosixPath(one["name"]).name == "index.json" for one in files):
        raise DataError(f"data file {url}: MDS and litdata are read from a local folder; copy it, or name its files")
    return sorted(files, key=lambda one: str(one["name"]))


def _copy_of(url: str, info: dict[str, Any]) -> Path:
    name = str(info["name"])
    told = [str(info[key]) for key in VERSION if key in info]
    if not told:
        log.warning("data file %s: its server tells no version, so a change that keeps its size is not seen", url)
    version = repr([url.partition("://")[0], name, info.get("size"), *told])
    path = unquote(urlsplit(name).path) if name.startswith(("http://", "https://")) else name
    return _folder() / hashlib.sha256(version.encode()).hexdigest()[:40] / PurePosixPath(path).name


def _fetch(system: Any, name: str, url: str, size: int, copy: Path) -> None:
    """Copy a file to the cache unless it is there; a draft is renamed when it is whole."""
    from filelock import FileLock

    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{copy.parent}.lock"):
            if copy.is_file():
                os.utime(copy.parent)
                return
            log.info("data: fetching %s", name if "://" in name else f"{url.partition('://')[0]}://{name.lstrip('/')}")
            draft = copy.with_name(f".{copy.name}")
            try:
                _persistent(url, lambda: _write(system, name, size, draft))
                draft.rename(copy)
            finally:
                draft.unlink(missing_ok=True)
    except OSError as error:
        hint = "set DISTCORE_CACHE to a folder that can be written"
        raise DataError(f"cache folder {cache_root()}: {error.strerror or error}; {hint}") from None


def _write(system: Any, name: str, size: int, draft: Path) -> None:
    with system.open(name, "rb") as source, draft.open("wb") as target:
        shutil.copyfileobj(source, target, BLOCK)
    if size >= 0 and draft.stat().st_size != size:
        raise EOFError(f"{draft.stat().st_size} of {size} bytes came")


def _persistent(url: str, action: Callable[[], T]) -> T:
    """Return the result of ``action``, which is tried again where a network fails; raises DataError."""
    for attempt in range(1, TRIES + 1):
        try:
            return action()
        except FileNotFoundError:
            raise DataError(f"data file {url}: no such file") from None
        except PermissionError as error:
            raise DataError(f"data file {url}: cannot be read: {_reason(error)}") from None
        except DataError:
            raise
        except Exception as error:  # each file system has its own
            if attempt == TRIES:
                said = f"cannot be fetched, after {TRIES} attempts: {_reason(error)}"
                raise DataError(f"data file {url}: {said}") from None
            time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
    raise AssertionError


def _make_room(limit: int, kept: set[Path]) -> None:
    """Remove copies, the one that was read longest ago first, until all take at most ``limit`` bytes."""
    files = [file for file in _folder().glob("*/*") if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    for file in sorted(files, key=lambda file: file.parent.stat().st_mtime):
        if total <= limit:
            return
        if file not in kept:
            total -= file.stat().st_size
            file.unlink(missing_ok=True)


def _folder() -> Path:
    return cache_root() / "remote"


def _limit() -> int:
    text = os.environ.get(LIMIT, str(BYTES))
    if not text.isascii() or not text.isdigit():
        raise DataError(f"{LIMIT}={text}: expected a number of bytes")
    return int(text)


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())[:REASON].strip()

"""Remote folders of MDS or litdata: which files their index names, and what a file system says
of each of them.

A folder in the cache stands for one, with a copy of its index. It is named by the versions of all
its files, so that a folder of which one file has changed is another one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from distcore import DataError
from distcore_data.fetching import AT_ONCE
from distcore_data.formats.installed import is_known, refuse_unread_shards, shard_format
from distcore_data.formats.opening import extension
from distcore_data.room import INDEX, copies_folder

Infos = Mapping[str, Mapping[str, Any]]
"""What a file system says of files, by name."""
VERSION = (
    "ETag",
    "etag",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
    "generation",
    "md5Hash",
    "Content-MD5",
    "Digest",
)
"""What file systems say about a version of a file, besides its size."""
log = logging.getLogger("distcore")


@dataclass(frozen=True, slots=True)
class ShardFolder:
    """A folder of shards."""

    copy: Path
    """The folder that stands for it, with its index."""
    infos: Infos
    """What the file system says of each shard, by its name in the folder."""


def is_http(url: str) -> bool:
    """Return True for a URL of a web server, which has no folders."""
    return url.startswith(("http://", "https://"))


def version_of(url: str, info: Mapping[str, Any]) -> list[object]:
    """Return size and version of a file."""
    told = [str(info[key]) for key in VERSION if key in info]
    if not told:
        log.warning(
            "data file %s: its server tells no version, so a change that keeps its size is not"
            " seen",
            url,
        )
    return [info.get("size"), *told]


def find_shards(system: Any, url: str, root: str) -> ShardFolder | None:
    """Return the folder of shards that a URL names, itself or its index;
    ``None`` for anything else.

    Raises DataError, or what the file system raises.
    """
    folder = root.removesuffix(f"/{INDEX}").rstrip("/")
    is_named = folder != root.rstrip("/")
    if (is_known(extension(Path(root))) and not is_named) or (
        re.search(r"[*?\[]", root) and not is_http(url)
    ):
        return None
    try:
        content: bytes = system.cat_file(f"{folder}/{INDEX}")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        return None  # some stores deny what is not there
    names = _names(url, content)
    if not names:
        return None
    infos = _infos(system, url, folder, names)
    if lost := next((name for name in names if name not in infos), None):
        raise DataError(f"data file {url}/{lost}: no such file, but {INDEX} names it")
    versions = [
        url.partition("://")[0],
        folder,
        content,
        [(name, *version_of(url, infos[name])) for name in names],
    ]
    copy = copies_folder() / hashlib.sha256(repr(versions).encode()).hexdigest()[:40]
    _write(copy / INDEX, content)
    return ShardFolder(copy, {name: infos[name] for name in names})


def _names(url: str, content: bytes) -> list[str]:
    """Return the names of the shards in the folder of an index; none if it is
    one of something else.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / INDEX).write_bytes(content)
        shards = shard_format(folder)
        try:
            if shards is None:
                refuse_unread_shards(folder)
            files = shards.files(folder) if shards else []
            return [str(file.relative_to(folder)) for file in files]
        except DataError as error:
            raise DataError(str(error).replace(name, url)) from None


def _infos(system: Any, url: str, folder: str, names: Sequence[str]) -> Infos:
    """Return what the file system says: in one answer, or of each file where
    there are no folders.
    """
    if not is_http(url):
        infos = system.find(folder, detail=True)
        return {
            str(PurePosixPath(name).relative_to(PurePosixPath(folder))): info
            for name, info in infos.items()
        }

    def info(name: str) -> dict[str, Mapping[str, Any]]:
        with suppress(FileNotFoundError):
            return {name: system.info(f"{folder}/{name}")}
        return {}

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(ChainMap(*pool.map(info, names)))


def _write(file: Path, content: bytes) -> None:
    """Write a draft and rename it, so that another process sees a whole file or none."""
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}-{os.getpid()}")
    draft.write_bytes(content)
    draft.rename(file)

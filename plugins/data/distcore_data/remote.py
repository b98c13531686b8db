"""Remote files, of anything that fsspec opens, as files in the cache. fsspec is imported when the
first one is named.

The copy of a file is named by URL, size and version (ETag, date), so a changed file has another
one, and a resume compares the rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from distcore import DataError
from distcore_data.fetching import REMOTE, RemoteFile, persistent, shortened
from distcore_data.remote_shards import find_shards, is_http, version_of
from distcore_data.room import copies_folder

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/{1,2}(?P<rest>[^/].*)")
_PATTERN = re.compile(r"[*?\[]")


def url_of(source: object) -> str | None:
    """Return the URL that a path stands for, which has lost one of its slashes; ``None``
    for a local path.
    """
    match = _URL.fullmatch(str(source))
    root = "/" if match and match["scheme"] == "file" else ""
    return f"{match['scheme']}://{root}{match['rest']}" if match else None


@cache  # a process sees one version of a file
def copies_of(url: str, formats: Callable[[Path], bool]) -> tuple[Path, ...]:
    """Return where the copies of the files of a URL, of a folder or of a pattern are, in the
    order of their names.

    ``present`` fetches them. ``formats`` says whether a file of a folder has rows.
    Raises DataError, one line.
    """
    system, root = _opened(url)
    if folder := persistent(url, lambda: find_shards(system, url, root)):
        copies = {folder.copy / name: info for name, info in folder.infos.items()}
        REMOTE.update({copy: _remote(system, url, info) for copy, info in copies.items()})
        return (folder.copy,)
    infos = persistent(url, lambda: _infos(system, url, root, formats))
    if not infos:
        is_folder = not _PATTERN.search(root)
        what = (
            "is a folder without data files; write folders of files as .tar"
            if is_folder
            else "no file has such a name"
        )
        raise DataError(f"data file {url}: {what}")
    copies = {_copy_of(url, info): info for info in infos}
    for copy, info in copies.items():
        REMOTE[copy] = _remote(system, url, info)
    return tuple(copies)


def _remote(system: Any, url: str, info: Mapping[str, Any]) -> RemoteFile:
    return RemoteFile(system, str(info["name"]), url, int(info.get("size") or 0))


def _opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise DataError(
            f"data file {url}: needs fsspec; pip install 'distcore-data[remote]'"
        ) from None
    try:
        system, root = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError, TypeError) as error:
        if isinstance(error, ImportError) and is_http(url):
            raise DataError(
                f"data file {url}: needs aiohttp; pip install 'distcore-data[remote]'"
            ) from None
        raise DataError(f"data file {url}: cannot be opened: {shortened(error)}") from None
    return system, str(root)


def _infos(
    system: Any, url: str, root: str, formats: Callable[[Path], bool]
) -> list[dict[str, Any]]:
    """Return what the file system says of each file; none for a pattern that matches nothing."""
    if is_http(url):  # a page with links is no folder, and ? no pattern
        return [system.info(root)]
    if _PATTERN.search(root):
        return [
            info
            for _, info in sorted(system.glob(root, detail=True).items())
            if info["type"] == "file"
        ]
    info = system.info(root)
    if info["type"] != "directory":
        return [info]
    files = [
        one
        for one in system.ls(root, detail=True)
        if one["type"] == "file" and formats(Path(one["name"]))
    ]
    return sorted(files, key=lambda one: str(one["name"]))


def _copy_of(url: str, info: dict[str, Any]) -> Path:
    name = str(info["name"])
    version = repr([url.partition("://")[0], name, *version_of(url, info)])
    path = unquote(urlsplit(name).path) if name.startswith(("http://", "https://")) else name
    return (
        copies_folder()
        / hashlib.sha256(version.encode()).hexdigest()[:40]
        / PurePosixPath(path).name
    )

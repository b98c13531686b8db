"""A cache of folders on disk. A folder is built once, even if several processes need
it at the same time.

The cache is ``$DISTCORE_CACHE``, else ``$XDG_CACHE_HOME/distcore``, else ``~/.cache/distcore``. It
can be built again, so it may be deleted whenever no run is starting.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from distcore import DataError

MANIFEST = "manifest.json"
"""Name of the file with the CRC-32 of every other file in a cached folder."""


def cache_root() -> Path:
    """Return the folder of the cache; it need not exist."""
    if chosen := os.environ.get("DISTCORE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "distcore"


def byte_setting(name: str, default: int) -> int:
    """Return the number of bytes that an environment variable sets. Raises
    DataError for anything else.
    """
    text = os.environ.get(name, str(default))
    if not text.isascii() or not text.isdigit():
        raise DataError(f"{name}={text}: expected a number of bytes")
    return int(text)


def cached_folder(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder ``kind/key`` of the cache, filled by ``build(folder)`` if it
    is missing or damaged.

    ``key`` must identify the content, for example by a hash of all its inputs: an intact folder is
    returned as it is. An exception of ``build`` passes through and leaves no folder. Raises
    DataError if the cache cannot be written.
    """
    folder = cache_root() / kind / key
    if _is_intact(folder):
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _is_intact(folder):
                _rebuild(folder, build)
    except OSError as error:
        hint = "set DISTCORE_CACHE to a folder that can be written"
        raise DataError(
            f"cache folder {cache_root()}: {error.strerror or error}; {hint}"
        ) from error
    return folder


def _rebuild(folder: Path, build: Callable[[Path], None]) -> None:
    """Build in a temporary folder and rename it; the caller holds the lock."""
    fresh = folder.with_name(f"{folder.name}.tmp")
    # of a process that was killed: nobody else builds under the lock
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        build(fresh)
        sums = {
            str(path.relative_to(fresh)): _checksum(path)
            for path in sorted(fresh.rglob("*"))
            if path.is_file()
        }
        (fresh / MANIFEST).write_text(json.dumps(sums), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _is_intact(folder: Path) -> bool:
    """Return True if every file still has the checksum that the manifest lists."""
    try:
        sums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all(_checksum(folder / name) == value for name, value in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file: fast, and enough against damage; it is no
    protection against an attacker.
    """
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value

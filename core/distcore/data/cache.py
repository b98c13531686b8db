"""A cache on disk: folders that exist whole or not at all, built once however many processes ask at once.

It lies under ``DISTCORE_CACHE``, else ``$XDG_CACHE_HOME/distcore``, else ``~/.cache/distcore``. Nothing in it is
precious: it may be deleted whenever no run is starting.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from distcore.errors import DataError

MANIFEST = "manifest.json"


def cache_root() -> Path:
    """Return the folder of the cache; it need not exist."""
    if chosen := os.environ.get("DISTCORE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "distcore"


def cached_folder(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of ``key``, filled by ``build(folder)`` if it is missing or damaged.

    ``key`` must name the content: whatever changes the content changes the key. What ``build`` raises passes
    through and leaves nothing behind. Raises DataError if the cache cannot be written.
    """
    folder = cache_root() / kind / key
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _is_whole(folder):
                _replace(folder, build)
    except OSError as error:
        hint = "set DISTCORE_CACHE to a folder that can be written"
        raise DataError(f"cache folder {cache_root()}: {error.strerror or error}; {hint}") from error
    return folder


def _replace(folder: Path, build: Callable[[Path], None]) -> None:
    """Build beside the folder and rename; the lock is held, so what lies there is left from a killed process."""
    fresh = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        build(fresh)
        sums = {str(path.relative_to(fresh)): _checksum(path) for path in sorted(fresh.rglob("*")) if path.is_file()}
        (fresh / MANIFEST).write_text(json.dumps(sums), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """True if every file has the checksum that it was sealed with."""
    try:
        sums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all(_checksum(folder / name) == value for name, value in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value

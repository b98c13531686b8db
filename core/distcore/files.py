"""Files: strict JSON for other programs, atomic writes, holding a file, paths that are found
again from any folder.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import IO, Any, TextIO

__all__ = [
    "GIT_LFS",
    "is_git_lfs_pointer",
    "is_locked",
    "same_place",
    "strict_json",
    "unique_json",
    "write_atomically",
]

GIT_LFS, MOST_BYTES_OF_POINTER = b"version https://git-lfs.github.com/spec/", 1024
"""How a pointer of Git LFS begins, and more bytes than it has."""


def strict_json(value: object, indent: int | None = None) -> str:
    """Return ``value`` as JSON text, not escaped to ASCII; NaN and Infinity become null,
    because JSON has neither.
    """
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def unique_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for a repeated key, because
    only one would count.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        value, end = _UNIQUE.raw_decode(text)
    except json.JSONDecodeError:  # it begins with blanks, or is no JSON
        return _UNIQUE.decode(text)
    # To look for blanks on both sides, as ``decode`` does, takes a quarter of the time of a row.
    return value if end == len(text) else _UNIQUE.decode(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raises ValueError for a key that it has twice.

    Python would keep the last one, in silence.
    """
    tree: dict[str, Any] = {}
    for name, value in pairs:
        if name in tree:
            raise ValueError(f"one object has the key {name!r} twice")
        tree[name] = value
    return tree


# which json.loads would make anew for each row
_UNIQUE = json.JSONDecoder(object_pairs_hook=_unique)


def is_git_lfs_pointer(file: Path) -> bool:
    """Return True for a text of three lines in place of a file, as a clone without
    Git LFS has it.
    """
    try:
        if file.stat().st_size > MOST_BYTES_OF_POINTER:
            return False
        with file.open("rb") as opened:
            return opened.read(len(GIT_LFS)) == GIT_LFS
    except OSError:
        return False


def write_atomically(file: Path, text: str) -> None:
    """Write ``text`` to ``file`` as UTF-8; another process sees the whole text or no new file.

    A temporary file in the same folder is renamed, which is atomic on one file system.
    """
    draft = file.with_name(f".{file.name}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal; raises OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def lock_shared(file: Path) -> TextIO | None:
    """Open ``file`` and hold it until it is closed or this process ends, however it
    ends; ``is_locked`` sees that.

    Several may hold a file, and nobody waits. Returns ``None`` on a file system without locks.
    """
    held = file.open(encoding="utf-8")
    for _ in range(3):  # somebody may be looking just now
        try:
            lock(held, shared=True)
            return held
        except OSError:
            time.sleep(0.01)
    held.close()
    return None


def is_locked(file: Path) -> bool:
    """Return True if some process holds ``file``; on another machine only where the file
    system shares its locks.
    """
    try:
        with file.open(encoding="utf-8") as tried:
            lock(tried)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def lock(file: IO[Any], shared: bool = False) -> None:
    """Lock an open file until it is closed, alone or ``shared``; raises BlockingIOError if
    another process has it.

    On Windows, which has no such locks, nothing is locked.
    """
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def absolute(path: str) -> str:
    """Return ``path`` absolute if it is there; anything else unchanged.

    It may be the ``file.py`` of a ``file.py:Class``, the ``folder`` of a ``folder@split``, a
    pattern, or several paths with commas.
    """
    if "," in path and not Path(path).exists():
        return ",".join(absolute(part.strip()) for part in path.split(","))
    for mark in (":", "@"):
        file, _, name = path.rpartition(mark)
        if (
            file
            and (mark == "@" or file.endswith(".py"))
            and Path(file).exists()
            and not Path(path).exists()
        ):
            return f"{os.path.abspath(file)}{mark}{name}"
    # A path that begins with ~ needs no folder: it is found from everywhere.
    there = Path(path).exists() or (glob.has_magic(path) and glob.glob(path))
    return os.path.abspath(path) if there else path


def same_place(one: object, other: object) -> bool:
    """Return True for equal values, and for two paths of one name of which at
    least one is absolute.

    The folder is ignored: a file may have been moved, or be named from another folder.
    """
    if not (isinstance(one, str) and isinstance(other, str)):
        return one == other
    rooted = os.path.isabs(one) or os.path.isabs(other)
    return one == other or (rooted and Path(one).name == Path(other).name)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

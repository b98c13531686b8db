"""Members of a tar file in one pass over its headers. A cut file is noticed, where
tarfile ends in silence.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distcore_data.formats.opening import pass_over

BLOCK = tarfile.BLOCKSIZE
CUT = "a part of the tar file is missing: write or fetch it again"


@dataclass(slots=True)
class Member:
    """A regular member, whose content is read before the next one or not at all."""

    name: str
    """The path in the tar file."""
    size: int
    """Number of bytes."""
    file: Any
    """The tar file, open at the content."""
    start: int
    """Bytes from where reading began to its first header."""
    is_read: bool = False
    """True after ``read``."""

    def read(self) -> bytes:
        """Return the content. Raises ValueError if the file ends in it."""
        self.is_read = True
        return _content(self.file, self.size, self.name)


def tar_members(file: Any) -> Iterator[Member]:
    """Yield the regular members.

    Raises ValueError, one line, for a file that is no tar file or ends before its end mark.
    """
    longer, is_tar, start, position = dict[str, str](), False, 0, 0
    while True:
        header = file.read(BLOCK)
        try:
            name, size, kind = _plain(header) or _any(header)
        except tarfile.HeaderError as error:
            if len(header) == BLOCK and not any(header):
                return  # the end mark
            raise ValueError(
                CUT if is_tar and len(header) < BLOCK else f"not a tar file, or damaged: {error}"
            ) from None
        is_tar = True
        position += BLOCK
        if kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            content = _content(file, size, "a header")
            position += _padded(size)
            longer |= (
                _pax(content)
                if kind == tarfile.XHDTYPE
                else {"path": content.rstrip(b"\0").decode()}
            )
            continue
        member = Member(longer.get("path", name), int(longer.get("size", size)), file, start)
        longer, start = {}, position + _padded(member.size)
        position = start
        if kind in tarfile.REGULAR_TYPES:
            yield member
        # a file that ends inside it has no header after it, which is noticed there
        if not member.is_read:
            pass_over(file, _padded(member.size))


def _plain(header: bytes) -> tuple[str, int, bytes] | None:
    """Return name, size and type of a member whose header is as most are, in a fifth of
    the time of tarfile.
    """
    kind, prefix = header[156:157], header[345:346]
    if kind not in (tarfile.REGTYPE, tarfile.XHDTYPE) or prefix != b"\0":
        return None
    try:
        size, total = int(header[124:135], 8), int(header[148:154], 8)
    except ValueError:  # of another base
        return None
    is_whole = sum(header) - sum(header[148:156]) + 8 * ord(" ") == total
    return (
        (header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape"), size, kind)
        if is_whole
        else None
    )


def _any(header: bytes) -> tuple[str, int, bytes]:
    info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    return info.name, info.size, info.type


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _content(file: Any, size: int, name: str) -> bytes:
    content: bytes = file.read(_padded(size))
    if len(content) < size:
        raise ValueError(f"{name} has {size} bytes, of which {len(content)} are there; {CUT}")
    if len(content) < _padded(size):
        raise ValueError(CUT)
    return content[:size]


def _pax(content: bytes) -> dict[str, str]:
    """Return the records of an extended header: ``LENGTH KEY=VALUE`` and a line end each."""
    records = {}
    while content.strip(b"\0"):
        length, _, _ = content.partition(b" ")
        key, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        records[key.decode()] = value.decode("utf-8", "surrogateescape")
        content = content[int(length) :]
    return records

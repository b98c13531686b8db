"""Members of a tar file in one pass over its headers. A cut file is noticed, where tarfile ends in silence."""

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
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            if len(header) == BLOCK and not any(header):
                return  # the end mark
            raise ValueError(
                CUT if is_tar and len(header) < BLOCK else f"not a tar file, or damaged: {error}"
            ) from None
        is_tar = True
        position += BLOCK
        if info.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            content = _content(file, info.size, "a header")
            position += _padded(info.size)
            longer |= _pax(content) if info.type == tarfile.XHDTYPE else {"path": content.rstrip(b"\0").decode()}
            continue
        member = Member(longer.get("path", info.name), int(longer.get("size", info.size)), file, start)
        longer, start = {}, position + _padded(member.size)
        position = start
        if info.isreg():
            yield member
        if not member.is_read:  # a file that ends inside it has no header after it, which is noticed there
            pass_over(file, _padded(member.size))


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

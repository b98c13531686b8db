"""Guess the encoding of a file that is not UTF-8, and name the command that converts it."""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path

from distcore import DataError

BLOCK = 2**20
"""Bytes that are read at a time."""


MAGIC = {
    b"\x1f\x8b": ("gzip", ".gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", ".zst"),
    b"BZh": ("bzip2", ".bz2"),
    b"\xfd7zXZ\0": ("xz", ".xz"),
    b"PAR1": ("Parquet", ".parquet"),
    b"ARROW1": ("Arrow", ".arrow"),
    b"PK\x03\x04": ("zip", ""),
}
"""The first bytes of files of other kinds, with their names and the suffix to give them."""


def not_utf8(path: Path) -> DataError:
    """Return the error for a file that is not UTF-8; read it again up to the first wrong byte."""
    if kind := _other_kind(path):
        return DataError(f"data file {path}: not text, but a file of another kind: {kind}")
    decoder, position, plain, block = codecs.getincrementaldecoder("utf-8")(), 0, True, b"?"
    with path.open("rb") as file:
        while block:
            block = file.read(BLOCK)
            position += len(block)
            try:
                plain &= decoder.decode(block, final=not block).isascii()
            except UnicodeDecodeError as error:
                content, start = error.object, error.start
                where = f"byte 0x{content[start]:02x} at offset {position - len(content) + start}"
                remedy = _conversion(path, content, plain and content[:start].isascii())
                return DataError(f"data file {path}: not UTF-8 text ({where}); {remedy}")
    return DataError(f"data file {path}: changed while it was read")


def _other_kind(path: Path) -> str:
    """Return the kind of a file by its first bytes, and a remedy; nothing for one
    that may be text.
    """
    with path.open("rb") as file:
        begin = file.read(8)
    for magic, (kind, suffix) in MAGIC.items():
        if begin.startswith(magic) and path.suffix.lower() != suffix:
            is_table = kind in ("Parquet", "Arrow")
            new = f"{path.stem}{suffix}" if is_table else path.name + suffix
            remedy = f"rename it to {new}" if suffix else "unzip it, and name what was in it"
            return f"it begins as {kind} does; {remedy}"
    return ""


def _conversion(path: Path, content: bytes, plain: bool) -> str:
    """Return a guess of the encoding of ``content``, and a remedy; ``plain``: all before the
    wrong byte is ASCII.
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif not plain:
        return "it is UTF-8 up to there: correct that place"
    elif _is_western(content):
        encoding = "cp1252"
    else:
        return f"convert it, with its encoding for ENCODING: {_iconv(path, 'ENCODING')}"
    return f"it looks like {encoding}; convert it: {_iconv(path, encoding)}"


def _is_western(content: bytes) -> bool:
    """Return True for mostly ASCII with cp1252 in between. Other scripts have
    no letters in ASCII.
    """
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        return False
    return sum(map(str.isascii, text)) > 0.8 * len(text)


def _iconv(path: Path, encoding: str) -> str:
    new = path.with_name(f"{path.stem}-utf8{path.suffix}")
    return f"iconv -f {encoding} -t utf-8 {shlex.quote(str(path))} > {shlex.quote(str(new))}"

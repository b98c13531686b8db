"""Files of rows as bytes and as lines, which may be compressed."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distcore import DataError
from distcore.registry import is_installed
from distcore_data.encodings import not_utf8
from distcore_data.formats.columns import RowError
from distcore_data.formats.places import START, Place
from distcore_data.formats.row_limit import bounded_lines

FileState = tuple[int, int, int]
"""What changes with a file: its number in the file system, its size, and when it was written."""
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
"""Second extensions of compressed files."""
TABS = ".tsv"
"""Extension of CSV files whose delimiter is a tab."""
ALIASES = {TABS: ".csv"}
"""Other extensions of a format."""
BROKEN: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
"""Exceptions of a file that cannot be read, or whose compression is damaged."""
with suppress(ImportError):  # Python may be built without it
    from lzma import LZMAError

    BROKEN += (LZMAError,)
SKIPPED = 2**20
"""Bytes of a file without seeking that are passed over at a time."""


def state_of(path: Path | str) -> FileState:
    """Return what changes with a file. Raises OSError."""
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def extension(path: Path) -> str:
    """Return the extension that names the format of a file's rows, in lower case: of
    ``a.csv.gz`` it is ``.csv``, and of ``a.tsv``, too.
    """
    written = written_extension(path)
    return ALIASES.get(written, written)


def written_extension(path: Path) -> str:
    """Return the extension of a file before that of its compression, in lower case."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def open_bytes(path: Path, compression: str = "", *, file: Any = None) -> Any:
    """Open a file for its bytes. ``compression``: ``gz`` or ``zstd``, else
    the last extension decides.

    ``file``: the open file, if there is one.
    """
    suffix = path.suffix.lower()
    if compression == "zstd" or suffix == ".zst":
        import pyarrow as pa

        return pa.input_stream(file or str(path), compression="zstd")
    if compression == "gz" or suffix == ".gz":
        return gzip.open(file or path)
    if suffix == ".bz2":
        import bz2

        return bz2.open(file or path)
    if suffix == ".xz":
        import lzma

        return lzma.open(file or path)
    return file or path.open("rb")


@contextmanager
def opened_at(path: Path, place: Place = START) -> Iterator[Any]:
    """Open a file for its bytes, decompressed, from ``place`` on; a compressed file is read up to
    it.
    """
    with path.open("rb") as raw, open_bytes(path, file=raw) as file:
        pass_over(file, place.part)
        yield file


def pass_over(file: Any, left: int) -> None:
    """Pass over so many bytes, or fewer at the end of the file."""
    if file.seekable():
        file.seek(left, 1)
        return
    while left and (block := file.read(min(left, SKIPPED))):
        left -= len(block)


def text_lines(
    path: Path, newline: str, place: Place = START, *, bounded: bool = True
) -> Iterator[str]:
    """Yield the lines of a text file from ``place`` on, one after the other from the disk;
    ``newline`` as for ``open``.

    If ``bounded``, a ``TooLong`` stands for each line over the limit. Raises RowError for the line
    from which on a compressed file cannot be read.
    """
    number, encoding = place.inner, "utf-8-sig" if place.is_start else "utf-8"
    try:
        with (
            opened_at(path, place) as file,
            io.TextIOWrapper(file, encoding=encoding, newline=newline) as text,
        ):
            lines = bounded_lines(text) if bounded else text
            for number, line in enumerate(lines, place.inner + 1):  # noqa: B007  # for the error
                yield line
    except BROKEN as error:
        raise broken(f"data file {path}, line {number + 1}", error, "cannot be read: ") from None
    except UnicodeDecodeError:
        raise not_utf8(path) from None


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be read."""
    return DataError(f"data file {path}: cannot be read: {reason(error)}")


def broken(where: str, error: Exception, problem: str = "", remedy: str = "") -> DataError:
    """Return the error for a file that cannot be read from a row on, which ``where`` names.

    It is a RowError for damage, which stays, and none for a disk that fails or a file that
    may not be read.
    """
    kind = DataError if isinstance(error, OSError) and error.errno else RowError
    return kind(f"{where}: {problem}{reason(error)}{remedy}")


def reason(error: BaseException) -> str:
    """Return what is wrong with a file, in one line."""
    said = str(getattr(error, "strerror", None) or error)
    return next(iter(said.splitlines()), type(error).__name__)


def need_pyarrow(name: str) -> None:
    """Raise DataError if pyarrow, which reads the source ``name``, is not installed."""
    if not is_installed("pyarrow"):
        raise DataError(f"{name}: needs pyarrow, which is not installed: pip install pyarrow")

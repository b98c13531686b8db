"""Rows of tar files as webdataset writes them: the members that share a
key, ``KEY.txt`` and ``KEY.cls``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from distcore import DataError
from distcore_data.formats.columns import (
    NOTHING,
    SKIPPED,
    Columns,
    Record,
    RowError,
    TwiceError,
    inside,
    record,
    required,
    row_error,
    tried,
)
from distcore_data.formats.opening import BROKEN, broken, opened_at, reason
from distcore_data.formats.places import START, Place
from distcore_data.formats.row_limit import most_bytes, over_limit
from distcore_data.formats.tar_members import tar_members

TEXTS = ("txt", "text", "transcript")
NUMBERS = ("cls", "cls2", "class", "index", "inx", "id")
TREES = ("json", "jsn")
IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm")
"""Extensions of members, as webdataset reads them; the content of others stays bytes."""
NAMED = {"text": TEXTS, "label": ("cls", "class"), "image": IMAGES}
"""Columns that are a member of one of these extensions, where no member has
the column's own name.
"""
Content = bytes | int | None
"""Content of a member; its size, if that is over the limit; ``None`` for one that is not wanted."""
TWICE = "\0"
"""Ends the extension of a member that a row has a second time."""
AGAIN = "\0again"
"""In the place of a member of a row whose key an earlier row has."""
DAMAGED: tuple[type[Exception], ...] = (ValueError, *BROKEN)
"""Exceptions of a file that is no tar file, or of which a part is missing."""
KEY = "__key__"
"""Column of the key."""
_NAME = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<extension>[^/]+)")


def read_tar(
    path: Path,
    columns: Columns,
    place: Place = START,
    wanted: Container[int] | None = None,
    file: Any = None,
) -> Iterator[Record | RowError]:
    """Yield the rows of a tar file from ``place`` on, ``SKIPPED`` for those
    that are not ``wanted``.

    ``file``: the open file, if there is one.
    A column is a member's extension, or a key in the member ``KEY.json``.
    """
    name, known = f"data file {path}", list[str]()

    def read() -> Record:
        if AGAIN in members:
            raise _twice(name, number, key)
        if twice := next((extension for extension in members if extension.endswith(TWICE)), None):
            raise row_error(name, number, f"has two members {key}.{twice.removesuffix(TWICE)}")
        row = _columns(name, number, key, members)
        for column in required(columns).values():
            if inside(row, column.split(".")) is NOTHING and column not in row and column in known:
                raise row_error(
                    name,
                    number,
                    f"{key} has no member or JSON key {column!r}, which the rows before have",
                )
        taken = record(name, number, row, columns)
        known.extend(() if known else row)
        return taken

    rows = _rows(path, name, columns, place, wanted, file)
    # read() reads all three names.
    for number, (key, members) in enumerate(rows, place.row + 1):  # noqa: B007
        yield tried(read) if wanted is None or number - 1 in wanted else SKIPPED


def _rows(
    path: Path,
    name: str,
    columns: Columns,
    place: Place,
    numbers: Container[int] | None,
    opened: Any,
) -> Iterator[tuple[str, dict[str, Content]]]:
    """Yield key and members of each row. Raises DataError for the first row that is not
    known to be whole.
    """
    wanted = {
        *TREES,
        *columns.values(),
        *(one for column in columns.values() for one in NAMED.get(column, ())),
    }
    number, last, row, most = place.row + 1, "", dict[str, Content](), most_bytes()
    seen = set[int]()
    try:
        with opened_at(path, place) if opened is None else nullcontext(opened) as file:
            if opened is not None:
                file.seek(place.part)
            for member in tar_members(file):
                key, extension = _parted(member.name)
                if not key:
                    continue
                if key != last and row:
                    yield last, row
                    number, row = number + 1, {}
                if key != last and hash(key) in seen:
                    row[AGAIN] = None
                seen.add(hash(key))
                last, extension = key, extension + TWICE * (extension in row)
                if extension in wanted and (numbers is None or number - 1 in numbers):
                    row[extension] = member.read() if member.size <= most else member.size
                else:
                    row[extension] = None
        if row:
            yield last, row
    except DAMAGED as error:
        raise broken(f"{name}, row {number}", error) from None
    if number == 1 and not row:
        raise DataError(f"{name}: holds no members named KEY.EXTENSION, such as 0001.txt")


def row_starts(path: Path, stream: Any) -> Iterator[int]:
    """Yield where each row of a tar file begins, in bytes. ``stream``:
    the open file, decompressed.
    """
    last, seen = "", set[int]()
    try:
        for member in tar_members(stream):
            key, _ = _parted(member.name)
            if key and key != last:
                if hash(key) in seen:
                    raise _twice(f"data file {path}", len(seen) + 1, key)
                last = key
                seen.add(hash(key))
                yield member.start
    except DAMAGED as error:
        raise broken(f"data file {path}", error) from None


def _twice(name: str, number: int, key: str) -> TwiceError:
    what = (
        f"an earlier row has its key, {key}, too; write the members of a key one after the other,"
        " and name each once"
    )
    return TwiceError(f"{name}, row {number}: {what}")


def _parted(member: str) -> tuple[str, str]:
    """Return key and extension of a member, split at the first dot of its name; no key for one that
    is of no row.
    """
    match = _NAME.fullmatch(member)
    if match is None or match["key"].rpartition("/")[2].startswith("__"):  # as webdataset does
        return "", ""
    return match["key"], match["extension"].lower()


def _columns(name: str, number: int, key: str, members: dict[str, Content]) -> dict[str, Any]:
    """Return the columns of a row: keys of its JSON, its members, and the
    members that ``NAMED`` names.
    """
    row: dict[str, Any] = {KEY: key}
    for extension, content in members.items():
        if isinstance(content, int):
            raise row_error(name, number, f"{key}.{extension} {over_limit(content)}")
        try:
            row[extension] = None if content is None else _decoded(extension, content)
        except ValueError as error:
            raise row_error(
                name, number, f"{key}.{extension} cannot be read: {reason(error)}"
            ) from None
    trees = [row[tree] for tree in TREES if isinstance(row.get(tree), dict)]
    for column, extensions in NAMED.items():
        there = [extension for extension in extensions if extension in members]
        if there and column not in members:
            row[column] = row[there[0]]
    return {column: value for tree in trees for column, value in tree.items()} | row


def _decoded(extension: str, content: bytes) -> object:
    kind = extension.rpartition(".")[2]
    if kind in TREES:
        return json.loads(content)
    if kind in TEXTS:
        return content.decode()
    if kind in NUMBERS:
        text = content.decode().strip()
        return int(text) if text.removeprefix("-").isdecimal() else text
    return content

"""The formats that are installed: entry points of ``distcore.readers``.

An extension is known by the name of an entry point alone; a format is imported when a source has
it. Formats of folders are asked in turn whether a folder is theirs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, distribution
from pathlib import Path
from typing import Any

from distcore import DataError, StrategyError
from distcore.hints import how_to_get
from distcore.registry import load, offers
from distcore_data.formats.columns import Columns
from distcore_data.formats.format import FileFormat, FolderFormat, Format, Rows
from distcore_data.formats.opening import ALIASES, extension
from distcore_data.formats.places import Place
from distcore_data.room import INDEX

GROUP = "readers"
"""The group of entry points, without ``distcore.``."""
ANY = "files"
"""The entry point that reads any source; no format."""
OF_FOLDERS = "folder."
"""Begins the names of entry points for formats of folders."""
KINDS_OF_INDEX = {"shards": "MDS", "chunks": "litdata"}
"""Keys of an index with a list of shards, and the formats that write it so."""
log = logging.getLogger("distcore")


@cache
def _own_entries() -> Mapping[str, EntryPoint]:
    """Return the entry points of this distribution.

    It is a library, too: a task that a run may load reads its formats, whatever plugins the run
    may load besides.
    """
    own = distribution("distcore-data").entry_points.select(group=f"distcore.{GROUP}")
    return {entry.name: entry for entry in own}


def _names() -> list[str]:
    """Return the names of all entry points, those of this distribution first. Imports none."""
    own = _own_entries()
    others = [name for name in offers(GROUP) if name not in own]
    return [name for name in (*own, *others) if name != ANY]


def extensions() -> list[str]:
    """Return the extensions of all formats of files, and their aliases."""
    names = [f".{name}" for name in _names() if not name.startswith(OF_FOLDERS)]
    return [*names, *ALIASES]


def is_known(kind: str) -> bool:
    """Return True for the extension of a format of files."""
    return kind.removeprefix(".") in _own_entries() or kind in extensions()


@cache
def _own_format(name: str) -> Any:
    """Return a format of this distribution. Raises StrategyError if another one has that name."""
    is_allowed = name in offers(GROUP)
    return load(GROUP, name) if is_allowed else _own_entries()[name].load()


def file_format(kind: str) -> FileFormat | None:
    """Return the format of files with an extension; ``None`` for an unknown one.

    Raises StrategyError, one line, if it does not import.
    """
    name = kind.removeprefix(".")
    if name == kind or not is_known(kind):
        return None
    form = _own_format(name) if name in _own_entries() else load(GROUP, name)
    return form if isinstance(form, FileFormat) else _read_from_the_start(form)


def _read_from_the_start(reader: Any) -> FileFormat:
    """Return the format of a reader that cannot begin at a place."""

    def read_rows(path: Path, columns: Columns, place: Place) -> Rows:
        yield from reader.read(path, columns)

    return FileFormat(read=reader.read, digest=reader.digest, read_rows=read_rows, is_copied=True)


def folder_formats() -> list[FolderFormat]:
    """Return the formats of folders, those with an index first."""
    forms = [_folder_format(name) for name in _names() if name.startswith(OF_FOLDERS)]
    known = [form for form in forms if form is not None]
    return sorted(known, key=lambda form: not form.has_index)


def _folder_format(name: str) -> FolderFormat | None:
    if name in _own_entries():
        return _own_format(name)  # type: ignore[no-any-return]
    return _format_of_others(tuple(offers(GROUP).get(name, ())))


@cache  # a broken one is told once
def _format_of_others(entries: tuple[EntryPoint, ...]) -> FolderFormat | None:
    """Return the format of an entry point; ``None``, with a warning, for a broken one, which must
    not keep folders of other formats from being read.
    """
    name = entries[0].name
    try:
        form: FolderFormat = load(GROUP, name)
    except StrategyError as error:
        log.warning("%s; folders of its format are not read", error)
        return None
    return form


def folder_format(folder: Path) -> FolderFormat | None:
    """Return the format of a folder; ``None`` if it has none, and for a file."""
    if not folder.is_dir():
        return None
    return next((form for form in folder_formats() if form.is_one(folder)), None)


def shard_format(folder: Path) -> FolderFormat | None:
    """Return the format of a folder with an index of its shards; ``None`` for others."""
    form = folder_format(folder)
    return form if form and form.has_index else None


def format_at(path: Path, kind: str = "") -> Format | None:
    """Return the format of a file or a folder; ``None`` if it has none that is known.

    ``kind``: the extension, where the name of a file does not tell it.
    """
    if path.is_dir():
        return folder_format(path)
    return file_format(kind or extension(path))


def format_of(path: Path) -> str:
    """Return the name of the format of a file or a folder: an extension, which need not be known,
    or a name such as ``MDS``; nothing for a folder without one.
    """
    if not path.is_dir():
        return extension(path)
    form = folder_format(path)
    return form.name if form else ""


def refuse_unread_shards(folder: Path) -> None:
    """Raise DataError for a folder of shards whose format is known, but not installed."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    for key, kind in KINDS_OF_INDEX.items():
        lists_shards = isinstance(index, dict) and isinstance(index.get(key), list)
        if lists_shards and kind not in names_of_shards():
            command = how_to_get(GROUP, f"{OF_FOLDERS}{kind.lower()}")
            raise DataError(
                f"data folder {folder}: its {INDEX} lists {key} of {kind}, whose reader is not"
                " installed: the extra 'shards' of distcore has it"
                + (f"; {command}" if command else "")
            )


def names_of_shards() -> Sequence[str]:
    """Return the names of the formats of folders with an index."""
    return [form.name for form in folder_formats() if form.has_index]

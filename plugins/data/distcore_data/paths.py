"""Data files that a path names: itself, those of a folder, a pattern, a URL, a list with
commas or a list file.

A list file ends in ``.list``: ``.txt`` is a text, and other tools have no common name
for such a file.
"""

from __future__ import annotations

import glob
from pathlib import Path

from distcore import DataError
from distcore_data.encodings import not_utf8
from distcore_data.fetching import is_copy
from distcore_data.formats.installed import (
    extensions,
    folder_format,
    format_of,
    is_known,
    refuse_unread_shards,
    shard_format,
)
from distcore_data.formats.opening import extension, unreadable
from distcore_data.remote import copies_of, url_of

LIST = ".list"
"""Extension of a file with a path on each line: of a data file, a folder or a pattern, relative
to its own folder.
"""


def files_of(source: Path) -> list[Path]:
    """Return the data files of a path, and the folders that are a source by themselves, such as
    one of MDS shards.

    Of remote files these are copies, which ``present`` fetches.
    """
    text = str(source)
    if source.is_dir():
        return _of_folder(source)
    if "," in text and not source.exists():
        return [
            file for part in text.split(",") for file in _of_part(Path(part.strip()).expanduser())
        ]
    if url := url_of(source):
        return list(copies_of(url, _has_rows))
    if source.suffix == LIST and source.is_file():
        return _of_list(source)
    if glob.has_magic(text) and not source.exists():
        return [
            file
            for path in sorted(glob.glob(text, recursive=True))
            for file in files_of(Path(path))
        ]
    return [source]


def _of_part(part: Path) -> list[Path]:
    """Return the files of one of several sources. Raises DataError if there are none: its
    rows would be missed.
    """
    if not (files := files_of(part)):
        what = "is a folder without data files" if part.is_dir() else "no file has such a name"
        raise DataError(f"data files {part}: {what}")
    return files


def _of_folder(folder: Path) -> list[Path]:
    """Return the folder itself if an index lists its shards, else its data files, else
    itself for other formats.
    """
    if shard_format(folder):
        return [folder]
    refuse_unread_shards(folder)
    known = extensions()
    files = sorted(path for path in folder.iterdir() if path.is_file() and extension(path) in known)
    return files or ([folder] if folder_format(folder) else [])


def _has_rows(file: Path) -> bool:
    return is_known(format_of(file))


def _of_list(file: Path) -> list[Path]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise not_utf8(file) from None
    except OSError as error:
        raise unreadable(file, error) from None
    files: list[Path] = []
    for number, line in enumerate(lines, 1):
        named = Path(line.strip()).expanduser()
        path = named if url_of(named) else file.parent / named
        if not line.strip():
            continue
        if path.suffix == LIST:
            raise DataError(
                f"data file {file}, line {number}: names another list; name its files here"
            )
        if not (there := files_of(path)) or not all(one.exists() or is_copy(one) for one in there):
            what = "is a folder without data files" if path.is_dir() else "no such file"
            raise DataError(f"data file {file}, line {number}: {what}: {path}")
        files += there
    if not files:
        raise DataError(f"data file {file}: lists no files; write one path a line")
    return files

"""The rows to predict, some at a time, from a file or another source that the task can open."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Protocol

from distcore import registry
from distcore.errors import DataError
from distcore.files import sha256_of
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import FileRows

READER = "files"
"""The entry point of ``distcore.readers`` that reads rows, unless one is named like the
suffix of the source.
"""


class Reader(Protocol):
    """The object of that entry point, a module or another one."""

    def read(self, source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        """Yield the values of ``columns``, config keys to names, in each row; raises DataError."""

    def digest(self, source: Path) -> str | None:
        """Return a digest of the rows; ``None`` for a folder without any. Raises DataError
        for a missing source.
        """


def windows(
    task: BoundTask, source: Path, id_column: str | None, size: int, skip: int = 0
) -> Iterator[FileRows]:
    """Yield the rows of ``source`` after the first ``skip``, in order, at most ``size`` at a time.

    ``id_column`` has the ids of the rows, if it is given. Raises DataError.
    """
    others = {"columns.id": id_column} if id_column else {}
    records, start = islice(_records(task, source, others), skip, None), skip + 1
    while window := list(islice(records, size)):
        ids = _ids(source, start, [record[-1] for record in window]) if others else None
        yield FileRows(
            file=str(source),
            start=start,
            records=[record[:-1] for record in window] if others else window,
            ids=ids,
        )
        start += len(window)


def content(source: Path) -> str:
    """Return a digest of a file's content, or of names, sizes and times of change
    of a folder's files.

    For a dataset or several files it is the digest of their rows. Raises DataError
    for a missing source.
    """
    if source.is_file():
        return sha256_of(source)
    if source.is_dir() and READER not in registry.entries("readers"):
        return _of_folder(source)  # which the task opens itself
    return _reader(source).digest(source) or _of_folder(source)


def _of_folder(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _records(
    task: BoundTask, source: Path, others: Mapping[str, str]
) -> Iterator[tuple[object, ...]]:
    opened = task.predictions.open_rows(source, others)
    return (
        opened
        if opened is not None
        else _reader(source).read(source, {**task.predictions.row_columns(), **others})
    )


def _reader(source: Path) -> Reader:
    suffix = source.suffix.removeprefix(".")
    reader: Reader = registry.load(
        "readers", suffix if suffix in registry.offers("readers") else READER
    )
    return reader


def _ids(source: Path, start: int, values: list[object]) -> list[int | str]:
    ids: list[int | str] = []
    for number, value in enumerate(values, start):
        if isinstance(value, bool) or not isinstance(value, int | str):
            shown = "missing" if value is None else f"{value!r:.40}"
            raise DataError(
                f"data file {source}, row {number}: id is {shown}, expected an integer or a string"
            )
        ids.append(value)
    return ids

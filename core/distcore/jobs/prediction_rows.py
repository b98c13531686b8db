"""The rows to predict, some at a time, from a file or another source that the task can open."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from distcore.data.files import read_records, source_digest
from distcore.data.formats import READERS, describe_value, format_of, row_error
from distcore.data.splits import find_split
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import FileRows


def windows(task: BoundTask, source: Path, id_column: str | None, size: int, skip: int = 0) -> Iterator[FileRows]:
    """Yield the rows of ``source`` after the first ``skip``, in order, at most ``size`` at a time.

    ``id_column`` has the ids of the rows, if it is given. Raises DataError.
    """
    others = {"columns.id": id_column} if id_column else {}
    records, start = islice(_records(task, source, others), skip, None), skip + 1
    while window := list(islice(records, size)):
        ids = _ids(source, start, [record[-1] for record in window]) if others else None
        yield FileRows(
            file=str(source), start=start, records=[record[:-1] for record in window] if others else window, ids=ids
        )
        start += len(window)


def content(source: Path) -> str:
    """Return a digest of a file's content, or of names, sizes and times of change of a folder's files.

    For a split of a dataset it is the digest of its rows. Raises DataError for a missing source.
    """
    if split := find_split(str(source)):
        return source_digest(split)
    if source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.is_file())
        facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if source.is_file() and format_of(source) not in READERS:
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return source_digest(source)


def _records(task: BoundTask, source: Path, others: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
    opened = task.open_rows(source, others)
    return (
        opened
        if opened is not None
        else read_records(find_split(str(source)) or source, {**task.row_columns(), **others})
    )


def _ids(source: Path, start: int, values: list[object]) -> list[int | str]:
    """Return the ids of rows that begin with number ``start``; raises DataError for an unusable id."""
    ids: list[int | str] = []
    for number, value in enumerate(values, start):
        if isinstance(value, bool) or not isinstance(value, int | str):
            problem = f"id is {describe_value(value)}, expected an integer or a string"
            raise row_error(f"data file {source}", number, problem)
        ids.append(value)
    return ids

"""The rows to predict, some at a time, from a file or another source that the task can open."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Protocol

from distcore import registry
from distcore.config.given_rows import READER
from distcore.errors import DataError
from distcore.files import sha256_of
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import FileRows


class Reader(Protocol):
    """What such an entry point names: a module, or another object with these functions."""

    def read(self, source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        """Yield the values of ``columns``, config keys to names, in each row; raises DataError.

        Without columns, as rows are counted, each is empty.
        """

    def digest(self, source: Path) -> str | None:
        """Return a digest of the rows; ``None`` for a folder without any. Raises DataError
        for a missing source.
        """

    def store(self, rows: object) -> str:
        """Keep rows that a program has in memory; return the path to read them from.

        The same rows have the same path. Raises DataError for rows that it cannot keep exactly. The
        core asks the reader ``files`` alone.
        """


def windows(
    task: BoundTask, source: Path, id_column: str | None, size: int, skip: int = 0
) -> Iterator[FileRows]:
    """Yield the rows of ``source`` after the first ``skip``, in order, at most ``size`` at a time.

    ``id_column`` has the ids of the rows, if it is given. Raises DataError.
    """
    id_columns = {"columns.id": id_column} if id_column else {}
    records = islice(_records(task, source, id_columns), skip, None)
    start = skip + 1
    while window := list(islice(records, size)):
        ids: list[int | str] | None = None
        if id_columns:
            # A record ends with its id.
            ids = _ids(source, start, [record[-1] for record in window])
            window = [record[:-1] for record in window]
        yield FileRows(file=str(source), start=start, records=window, ids=ids)
        start += len(window)


def content(source: Path) -> str:
    """Return a digest of a source: of a file's content, or of the rows of a dataset or of several
    files.

    Of a folder without rows it covers names, sizes and times of change of the files. Raises
    DataError for a missing source.
    """
    if source.is_file():
        return sha256_of(source)
    if source.is_dir() and READER not in registry.entries("readers"):
        # The task opens the folder itself.
        return _digest_of_folder(source)
    digest_of_rows = _reader(source).digest(source)
    return digest_of_rows or _digest_of_folder(source)


def _digest_of_folder(folder: Path) -> str:
    """Return a digest of path, size and time of change of each file, at any depth."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    facts = []
    for path in files:
        status = path.stat()
        facts.append((str(path), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _records(
    task: BoundTask, source: Path, others: Mapping[str, str]
) -> Iterator[tuple[object, ...]]:
    """Yield the records of the task's columns, and last the values of the columns ``others``."""
    records = task.predictions.open_rows(source, others)
    if records is not None:
        return records
    # A task that does not open sources names the columns to read.
    columns = {**task.predictions.row_columns(), **others}
    return _reader(source).read(source, columns)


def _reader(source: Path) -> Reader:
    """Return the reader for the suffix of the source, or the one for any."""
    suffix = source.suffix.removeprefix(".")
    has_reader = suffix in registry.offers("readers")
    reader: Reader = registry.load("readers", suffix if has_reader else READER)
    return reader


def _ids(source: Path, start: int, values: list[object]) -> list[int | str]:
    """Return ``values`` if all can be ids; raises DataError. ``start``: row number of the first."""
    ids: list[int | str] = []
    for number, value in enumerate(values, start):
        # For Python a bool is an int.
        if isinstance(value, bool) or not isinstance(value, int | str):
            shown = "missing" if value is None else f"{value!r:.40}"
            raise DataError(
                f"data file {source}, row {number}: id is {shown}, expected an integer or a string"
            )
        ids.append(value)
    return ids

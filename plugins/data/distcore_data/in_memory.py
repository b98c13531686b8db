"""Rows that a program has in memory: a DataFrame, a dataset of datasets, a list of dicts.

They are written to the cache, once, under the digest of their content, and are read from there like
any other file: by each rank, and by a run that goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from distcore import DataError
from distcore_data.cache import byte_setting, cache_root
from distcore_data.hub import silence_datasets

LIMIT = "DISTCORE_ROWS_BYTES"
"""Environment variable with the most bytes of all rows that were given in memory."""
BYTES = 20 * 2**30
"""Its default."""
CHUNK = 10_000
"""Rows of a table that become Python objects at a time."""
LEFT_OVER = 24 * 3600
"""Seconds after which a draft is one of a process that was killed."""
DRAFT = ".draft-"
"""Begins the name of a folder that is being written."""
NAME = "rows given in memory"


def store(rows: object) -> str:
    """Write rows to the cache unless it has them; return the path of their file or folder.

    The same values always have the same path. Raises DataError for rows that cannot be written
    exactly, one line.
    """
    folder = cache_root().absolute() / "rows"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(prefix=DRAFT, dir=folder))
        try:
            return str(_keep(_written(rows, draft), folder))
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        hint = "set DISTCORE_CACHE to a folder that can be written"
        raise DataError(f"{NAME}: {folder}: {error.strerror or error}; {hint}") from error


def _written(rows: object, draft: Path) -> Path:
    """Write rows into the folder ``draft``; return the file or the folder."""
    library = type(rows).__module__.partition(".")[0]
    if library == "datasets":
        return _write_dataset(rows, draft / "dataset")
    file = draft / "rows.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for number, row in enumerate(_rows_of(rows, library), 1):
            lines.write(_line(row, number))
    return file


def _rows_of(rows: Any, library: str) -> Iterator[Mapping[object, object]]:
    """Yield each row as a mapping, with ``None`` for what a DataFrame lacks."""
    if library == "pandas":
        yield from _rows_of_pandas(rows)
    elif library == "polars":
        yield from rows.iter_rows(named=True)
    elif library == "pyarrow":
        for batch in rows.to_batches(max_chunksize=CHUNK):
            yield from batch.to_pylist()
    elif isinstance(rows, Sequence):
        yield from rows
    else:
        raise DataError(
            f"{NAME}: a {type(rows).__name__}; expected a DataFrame, a pyarrow.Table, a"
            " datasets.Dataset, or a list of dicts"
        )


def _rows_of_pandas(frame: Any) -> Iterator[dict[object, object]]:
    """Yield the rows of a DataFrame; its index is left out."""
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DataError(f"{NAME}: the DataFrame has two columns {twice!r}; rename one")
    for start in range(0, len(frame), CHUNK):
        chunk = frame.iloc[start : start + CHUNK]
        lacks = chunk.isna().to_dict("records")
        for row, lacking in zip(chunk.to_dict("records"), lacks, strict=True):
            yield {column: None if lacking[column] else row[column] for column in row}


def _line(row: object, number: int) -> str:
    """Return a row as a line of JSON; raises DataError for a value that JSON does not have."""
    where = f"{NAME}, row {number}"
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a {type(row).__name__}, expected a dict")
    for column in row:
        if not isinstance(column, str):
            raise DataError(f"{where}: a column is named {column!r}; name each by a text")
    plain = {column: _plain(value, f"{where}: {column!r}") for column, value in row.items()}
    line = json.dumps(plain, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: not valid text: it has half of a surrogate pair") from None
    return f"{line}\n"


def _plain(value: object, where: str) -> object:
    """Return a value as JSON has it, exactly; raises DataError, with ``where``, if it cannot."""
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"{where} is {value}, which no number of JSON is; None is missing")
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, where) for inner in value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        # An array, or a number; one of another kind, such as a date, would stay what it is.
        python_value = value.tolist()
        if type(python_value).__module__ == "builtins":
            return _plain(python_value, where)
    kind = type(value).__name__
    raise DataError(
        f"{where} is a {kind}, expected text, a number, a list or a dict; convert it, or give a"
        " datasets.Dataset or the path of a file"
    )


def _write_dataset(rows: Any, folder: Path) -> Path:
    """Write a dataset of datasets as Arrow, which keeps its types and the names of its classes."""
    kind = type(rows).__name__
    if kind in ("DatasetDict", "IterableDatasetDict"):
        names = ", ".join(map(str, rows))
        raise DataError(
            f"{NAME}: a {kind} with the splits {names}; give one, as data=…[NAME], and others as"
            " eval_data and test_data"
        )
    if not hasattr(rows, "save_to_disk"):
        raise DataError(f"{NAME}: a {kind}; give a datasets.Dataset, or the name of its source")
    with silence_datasets():
        rows.save_to_disk(str(folder))
    return folder


def _keep(written: Path, folder: Path) -> Path:
    """Move what was written to its place in the cache, unless it is there; return its place."""
    size = _size(written)
    most = byte_setting(LIMIT, BYTES)
    if size > most:
        raise DataError(
            f"{NAME}: take {size} bytes, over {LIMIT}={most}; raise it, or write them to a file"
            " and name that"
        )
    kept = folder / f"{_digest(written)}{written.suffix}"
    _make_room(folder, most - size, kept)
    if not kept.exists():
        # Another process that has just written the same is as good.
        with suppress(OSError):
            written.rename(kept)
    os.utime(kept)
    return kept


def _make_room(folder: Path, most: int, kept: Path) -> None:
    """Remove rows that nobody gave for the longest time, until all others take at most ``most``
    bytes.
    """
    ages: list[tuple[float, Path]] = []
    with suppress(FileNotFoundError):  # another process makes room
        ages = sorted((path.stat().st_mtime, path) for path in folder.iterdir() if path != kept)
    taken = 0
    for age, path in reversed(ages):
        if path.name.startswith(DRAFT):
            if time.time() - age > LEFT_OVER:
                shutil.rmtree(path, ignore_errors=True)
            continue
        taken += _size(path)
        if taken > most:
            remove: Callable[[Path], object] = shutil.rmtree if path.is_dir() else os.unlink
            with suppress(FileNotFoundError):
                remove(path)


def _content(path: Path) -> list[Path]:
    """Return the files that hold the rows: the file itself, or the Arrow files of a folder and the
    types of their columns.
    """
    if path.is_file():
        return [path]
    return sorted([*path.glob("*.arrow"), path / "dataset_info.json"])


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in _content(path))


def _digest(path: Path) -> str:
    """Return the SHA-256 of the rows: of each file's bytes, in order."""
    digest = hashlib.sha256()
    for file in _content(path):
        with file.open("rb") as source:
            while block := source.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:40]

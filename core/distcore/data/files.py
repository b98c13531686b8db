"""Records from ``.json``, ``.jsonl``, ``.csv`` and ``.parquet`` files, and from splits of Arrow datasets.

Each problem with a source is a one-line error.

A record is the tuple of the values that a row has in the columns asked for. What the values mean is the task's
business.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distcore.data.encodings import not_utf8
from distcore.data.splits import Split
from distcore.errors import DataError, nearest

DELIMITERS = ",;\t"
"""What may stand between the values of a CSV file; the first goes before the others where several fit."""
DECODED_ROWS = 1024
"""Rows of a Parquet or an Arrow file that are decoded at a time."""
UNREADABLE = (OSError, KeyError, ValueError, OverflowError)
"""What pyarrow raises beside its own errors: for two columns of one name, bytes that are no text, impossible dates."""
Source = Path | Split
"""Where rows come from: a data file, or a split of a dataset of the library ``datasets``."""
Record = tuple[object, ...]
Columns = Mapping[str, str]
"""The config key that names a column (``columns.text``) to the column's name, in the order of a record's values."""


def read_records(source: Source, columns: Columns) -> Iterator[Record]:
    """Yield the values of ``columns`` in each row of the source, in order.

    A row of a JSON file is an object with these columns, or a list with one value per column. CSV has no types, so its
    values are all strings; they are separated by the one of ``DELIMITERS`` that finds the columns in the header. A
    class of a split is the class name if the dataset has one.
    Raises DataError for an unusable source, some of it only while the records are read; the message names the source
    and, where there is one, the row, counted from 1 without a header. A ``.json`` file is held in memory as a whole, of
    a Parquet file a row group, of CSV and ``.jsonl`` a line, of a split ``DECODED_ROWS``.
    """
    check_source(source)
    if isinstance(source, Split):
        return _arrow(source, columns)
    return READERS[source.suffix.lower()](source, columns)


def source_name(source: Source) -> str:
    """Return what messages call the source: ``data file reviews.csv``, ``dataset reviews@train``."""
    return f"{'dataset' if isinstance(source, Split) else 'data file'} {source}"


def check_source(source: Source) -> None:
    """Raise DataError unless ``source`` is a split, or a readable file, not empty, in a known format."""
    if isinstance(source, Split):
        _check_pyarrow(source)
        return
    if source.is_dir():
        expected = f"a file ({', '.join(READERS)}) or a folder that save_to_disk of datasets wrote"
        raise DataError(f"data file {source}: is a folder, expected {expected}")
    if not source.exists():
        beside = (path.name for path in source.parent.iterdir()) if source.parent.is_dir() else ()
        raise DataError(f"data file {source}: no such file{nearest(source.name, beside)}")
    if source.suffix.lower() not in READERS:
        known = ", ".join(READERS)
        raise DataError(f"data file {source}: unknown extension {source.suffix!r} (known: {known})")
    if not source.is_file():
        raise DataError(f"data file {source}: not a regular file")
    if source.stat().st_size == 0:
        raise DataError(f"data file {source}: is empty")
    if source.suffix.lower() == ".parquet":
        _check_pyarrow(source)


def _check_pyarrow(source: Source) -> None:
    if find_spec("pyarrow") is None:
        needs = "needs pyarrow, which is not installed: pip install 'distcore-core[parquet]'"
        raise DataError(f"{source_name(source)}: {needs}")


def source_digest(source: Source) -> str:
    """Return the SHA-256 of the source's content in hexadecimal, followed by the extension, which decides the format.

    Raises DataError if it cannot be read.
    """
    check_source(source)
    if isinstance(source, Split):
        return hashlib.sha256("".join(map(_sha256, source.files)).encode()).hexdigest() + source.suffix
    return _sha256(source) + source.suffix.lower()


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None


def row_error(name: str, number: int, problem: str) -> DataError:
    """Return the error for row ``number``, counted from 1; ``name`` says what the rows belong to."""
    return DataError(f"{name}, row {number}: {problem}")


def describe_value(value: object) -> str:
    """Return the type of ``value`` in plain words, with the value itself, shortened, for use in an error message."""
    if value is None:
        return "missing (null)"
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)} values"
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string"}
    shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
    return f"{names.get(type(value), type(value).__name__)} ({shown})"


def _lines(path: Path, newline: str) -> Iterator[str]:
    """Yield the lines of a text file, one after the other from the disk; ``newline`` as for ``open``."""
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            yield from file
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError:
        raise not_utf8(path) from None


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data file {path}: cannot be read: {error.strerror or error}")


def _json(path: Path, columns: Columns) -> Iterator[Record]:
    tree = _parse(path, "".join(_lines(path, "")), 1)
    if not isinstance(tree, list):
        raise DataError(f"data file {path}: expected a list of {_as_list(columns)} rows, found {describe_value(tree)}")
    return (_record(path, number, row, columns) for number, row in enumerate(tree, 1))


def _jsonl(path: Path, columns: Columns) -> Iterator[Record]:
    number = 0
    for line_number, line in enumerate(_lines(path, "\n"), 1):
        if line.strip():
            number += 1
            yield _record(path, number, _parse(path, line.removesuffix("\n"), line_number), columns)


def _parse(path: Path, text: str, line: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {line + error.lineno - 1}, column {error.colno}"
        raise DataError(f"data file {path}, {where}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"data file {path}, line {line}: not usable JSON: {error}") from None


def _record(path: Path, number: int, row: object, columns: Columns) -> Record:
    """Take the values of ``columns`` out of a JSON row: a list of so many values, or an object."""
    if isinstance(row, list) and len(row) == len(columns):
        return tuple(row)
    name = f"data file {path}"
    if isinstance(row, dict):
        for setting, column in columns.items():
            if column not in row:
                raise row_error(name, number, _missing(setting, row, columns))
        return tuple(row[column] for column in columns.values())
    as_object = "{" + ", ".join(f'"{column}": …' for column in columns.values()) + "}"
    expected = f"{_as_list(columns)} or {as_object}"
    raise row_error(name, number, f"expected {expected}, found {describe_value(row)}")


def _as_list(columns: Columns) -> str:
    """Show a row in the form of a list: ``[text, label]``."""
    return f"[{', '.join(setting.rpartition('.')[2] for setting in columns)}]"


def _missing(setting: str, names: Iterable[str], columns: Columns) -> str:
    names = list(names)
    existing = ", ".join(map(str, names)) or "none"
    column = columns[setting]
    return f"no column {column!r}{nearest(column, names)} (found: {existing}); name it with --set {setting}=NAME"


def _csv(path: Path, columns: Columns) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # by default no value may be longer than 128 KiB
    lines = _csv_lines(path, _delimiter(path, columns))
    header = next(lines, None)
    if header is None:
        raise DataError(f"data file {path}: holds no rows")
    positions = [_position(f"data file {path}", header, setting, columns) for setting in columns]
    for number, line in enumerate(lines, 1):
        if len(line) != len(header):
            problem = f"expected {len(header)} values as in the header, found {len(line)}"
            raise row_error(f"data file {path}", number, problem)
        yield tuple(line[position] for position in positions)


def _delimiter(path: Path, columns: Columns) -> str:
    """Return the delimiter with which the header has all columns or, if there is none, the most columns of any name."""

    def fit(delimiter: str) -> tuple[bool, int]:
        lines = csv.reader(_lines(path, ""), delimiter=delimiter)
        header = next(filter(None, lines), [])
        return set(columns.values()) <= set(header), len(header)

    return max(DELIMITERS, key=fit)


def _csv_lines(path: Path, delimiter: str) -> Iterator[list[str]]:
    reader = csv.reader(_lines(path, ""), delimiter=delimiter, strict=True)
    try:
        yield from (line for line in reader if line)
    except csv.Error as error:
        raise DataError(f"data file {path}, line {reader.line_num}: not valid CSV: {error}") from None


def _position(name: str, names: list[str], setting: str, columns: Columns) -> int:
    """Return the index of the column that ``setting`` names among the column ``names`` of what is called ``name``."""
    if columns[setting] not in names:
        raise DataError(f"{name}: {_missing(setting, names, columns)}")
    return names.index(columns[setting])


def _parquet(path: Path, columns: Columns) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # No threads: ranks are forked from this process, and a fork does not copy threads.
        file = pq.ParquetFile(path, pre_buffer=False)
        for setting in columns:
            _position(f"data file {path}", file.schema_arrow.names, setting, columns)
        names = list(dict.fromkeys(columns.values()))
        for batch in file.iter_batches(DECODED_ROWS, columns=names, use_threads=False):
            yield from zip(*(batch.column(name).to_pylist() for name in columns.values()), strict=True)
    except (pa.ArrowException, *UNREADABLE) as error:
        raise DataError(f"data file {path}: not a readable Parquet file: {_first_line(error)}") from None


def _arrow(split: Split, columns: Columns) -> Iterator[Record]:
    """Yield records of memory-mapped files: what is not asked for is not read from the disk."""
    import pyarrow as pa

    name, start = source_name(split), 1
    for path in split.files:
        try:
            with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
                places = [_position(name, stream.schema.names, setting, columns) for setting in columns]
                classes = [arrow_class_names(stream.schema, column) for column in columns.values()]
                for batch in stream:
                    for first in range(0, batch.num_rows, DECODED_ROWS):
                        some = batch.slice(first, DECODED_ROWS)
                        values = [
                            _with_class_names(name, start, some.column(place).to_pylist(), names)
                            for place, names in zip(places, classes, strict=True)
                        ]
                        yield from zip(*values, strict=True)
                        start += some.num_rows
        except (pa.ArrowException, *UNREADABLE) as error:
            raise DataError(f"{name}: {path} cannot be read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def arrow_class_names(schema: Any, column: str) -> list[str]:
    """Return the class names that ``ClassLabel`` of datasets keeps in an Arrow schema; none for other columns."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return list(map(str, names)) if isinstance(names, list) else []


def _with_class_names(name: str, start: int, values: list[Any], names: list[str]) -> list[object]:
    """Return the values with the names of classes for their numbers; -1, which datasets has for no label, is None."""
    if not names:
        return values
    for row, value in enumerate(values, start):
        if value is not None and not -1 <= value < len(names):
            raise row_error(name, row, f"label {value} is out of range: the dataset names {len(names)} classes")
    return [None if value is None or value < 0 else names[value] for value in values]


READERS: dict[str, Callable[[Path, Columns], Iterator[Record]]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""File extension to the function that reads such a file."""

"""Rows of one data file, by its format: JSON, JSON lines, CSV, Parquet, lines of text, and Arrow files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distcore import DataError, nearest
from distcore.files import unique_json
from distcore_data.encodings import not_utf8

COMPRESSED = (".gz", ".zst")
"""Second extensions of compressed files."""
DELIMITERS = ",;\t"
"""Delimiters of a CSV file; the first that fits is taken."""
DECODED_ROWS = 1024
"""Rows of a Parquet or an Arrow file that are decoded at a time."""
UNREADABLE = (OSError, KeyError, ValueError, OverflowError)
"""Other exceptions of pyarrow: for two columns of one name, invalid UTF-8, impossible dates."""
NOTHING = object()
"""A missing column of a row, as opposed to null."""
Record = tuple[object, ...]
Columns = Mapping[str, str]
"""The config key that names a column (``columns.text``) to the column's name, in the order of a record's values."""


def format_of(path: Path) -> str:
    """Return the extension that names the format of a file's rows, in lower case: of ``a.csv.gz`` it is ``.csv``."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def row_error(name: str, number: int, problem: str) -> DataError:
    """Return the error for row ``number``, counted from 1, of the source ``name``."""
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
        with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text:
            yield from text
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError:
        raise not_utf8(path) from None


def _open(path: Path) -> Any:
    """Open a file for its bytes, which may be compressed."""
    if path.suffix == ".zst":
        import pyarrow as pa

        return pa.input_stream(str(path), compression="zstd")
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be read."""
    return DataError(f"data file {path}: cannot be read: {getattr(error, 'strerror', None) or error}")


def _json(path: Path, columns: Columns) -> Iterator[Record]:
    if _has_a_row_per_line(path):
        return _jsonl(path, columns)
    tree = _parse(path, "".join(_lines(path, "")), 1)
    if isinstance(tree, dict) and all(column in tree for column in columns.values()):
        tree = [tree]  # a file of one line
    if not isinstance(tree, list):
        raise DataError(f"data file {path}: expected a list of {_as_list(columns)} rows, found {describe_value(tree)}")
    return (_record(path, number, row, columns) for number, row in enumerate(tree, 1))


def _has_a_row_per_line(path: Path) -> bool:
    """Return True if the first line is whole by itself and others follow, as the scripts of transformers write them."""
    lines = (line for line in _lines(path, "\n") if line.strip())
    first, second = next(lines, ""), next(lines, "")
    try:
        return bool(second) and json.loads(first) is not None
    except (ValueError, RecursionError):
        return False


def _jsonl(path: Path, columns: Columns) -> Iterator[Record]:
    number = 0
    for line_number, line in enumerate(_lines(path, "\n"), 1):
        if line.strip():
            number += 1
            yield _record(path, number, _parse(path, line.removesuffix("\n"), line_number), columns)


def _text(path: Path, columns: Columns) -> Iterator[Record]:
    for setting in columns:
        if "text" not in (setting.rpartition(".")[2], columns[setting]):
            raise DataError(f"data file {path}: {_missing(setting, ['text'], columns)}")
    for line in _lines(path, "\n"):
        if line.strip():
            yield (line.rstrip("\r\n"),) * len(columns)


def _parse(path: Path, text: str, line: int) -> object:
    try:
        return unique_json(text)
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
            if column not in row and _inside(row, column.split(".")) is NOTHING:
                raise row_error(name, number, _missing(setting, _dotted(row), columns))
        return tuple(row[column] if column in row else _inside(row, column.split(".")) for column in columns.values())
    as_object = "{" + ", ".join(f'"{column}": …' for column in columns.values()) + "}"
    expected = f"{_as_list(columns)} or {as_object}"
    raise row_error(name, number, f"expected {expected}, found {describe_value(row)}")


def _inside(value: object, names: Sequence[str]) -> object:
    """Return the value of the column ``names``, each inside the one before; NOTHING if it is not there."""
    for name in names:
        value = value.get(name, NOTHING) if isinstance(value, dict) else None if value is None else NOTHING
    return value


def _dotted(row: Mapping[str, object]) -> list[str]:
    """Return the names of a row's columns, those inside another with a dot."""
    inside = {key: value if isinstance(value, dict) else {} for key, value in row.items()}
    return [name for key, inner in inside.items() for name in ([f"{key}.{k}" for k in inner] or [key])]


def _as_list(columns: Columns) -> str:
    """Show a row in the form of a list: ``[text, label]``."""
    return f"[{', '.join(setting.rpartition('.')[2] for setting in columns)}]"


def _missing(setting: str, names: Iterable[str], columns: Columns) -> str:
    known, column = list(map(str, names)), columns[setting]
    listed = ", ".join(known) or "none"
    return f"no column {column!r}{nearest(column, known)} (found: {listed}); name it with --set {setting}=NAME"


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
    """Return the delimiter with which the header has all columns, else the one with the most columns of any name."""

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
    """Return the index of the column of ``setting``, or of the column that contains it.

    ``names`` are the columns of the source ``name``.
    """
    column = columns[setting]
    for known in (column, column.split(".")[0]):
        if known in names:
            return names.index(known)
    raise DataError(f"{name}: {_missing(setting, names, columns)}")


def _parquet(path: Path, columns: Columns) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    name = f"data file {path}"
    try:
        # No threads: ranks are forked from this process, and a fork does not copy threads.
        file = pq.ParquetFile(path, pre_buffer=False)
        there = file.schema_arrow.names
        tops = {setting: there[_position(name, there, setting, columns)] for setting in columns}
        for batch in file.iter_batches(DECODED_ROWS, columns=list(dict.fromkeys(tops.values())), use_threads=False):
            yield from zip(
                *(_values(name, batch.column(top), top, setting, columns) for setting, top in tops.items()), strict=True
            )
    except (pa.ArrowException, *UNREADABLE) as error:
        raise DataError(f"{name}: not a readable Parquet file: {_first_line(error)}") from None


def _values(name: str, column: Any, top: str, setting: str, columns: Columns) -> list[Any]:
    """Return the values of an Arrow column or, where ``setting`` names a column inside ``top``, of that one."""
    values: list[Any] = column.to_pylist()
    if columns[setting] == top:
        return values
    inside = columns[setting].split(".")[1:]
    if NOTHING in (chosen := [_inside(value, inside) for value in values]):
        row = {top: values[chosen.index(NOTHING)]}
        raise DataError(f"{name}: {_missing(setting, _dotted(row), columns)}")
    return chosen


def read_arrow(name: str, files: Iterable[Path], columns: Columns) -> Iterator[Record]:
    """Yield records of memory-mapped files; other columns are not read from disk."""
    import pyarrow as pa

    start = 1
    for path in files:
        try:
            with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
                there = stream.schema.names
                places = [_position(name, there, setting, columns) for setting in columns]
                classes = [arrow_class_names(stream.schema, column) for column in columns.values()]
                for batch in stream:
                    for first in range(0, batch.num_rows, DECODED_ROWS):
                        some = batch.slice(first, DECODED_ROWS)
                        values = [
                            _values(name, some.column(place), there[place], setting, columns)
                            for place, setting in zip(places, columns, strict=True)
                        ]
                        yield from zip(*map(partial(_with_class_names, name, start), values, classes), strict=True)
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
    """Replace class numbers by names; -1, the number of no label in datasets, becomes None."""
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
    ".txt": _text,
}
"""File extension to the function that reads such a file."""

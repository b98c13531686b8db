"""Records from ``.json``, ``.jsonl``, ``.csv`` and ``.parquet`` files; each problem with a file is a one-line error.

A record is the tuple of the values that a row has in the columns asked for. What the values mean is the task's
business.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from distcore.errors import DataError, nearest

DELIMITERS = ",;\t"
"""What may stand between the values of a CSV file; the first goes before the others where several fit."""
BLOCK = 2**20
"""Bytes that are read at a time where a file is searched."""
PARQUET_ROWS = 1024
"""Rows of a Parquet file that are decoded at a time."""
Record = tuple[object, ...]
Columns = Mapping[str, str]
"""The config key that names a column (``columns.text``) to the column's name, in the order of a record's values."""


def read_records(path: Path, columns: Columns) -> Iterator[Record]:
    """Yield the values of ``columns`` in each row of the file, in file order.

    A row of a JSON file is an object with these columns, or a list with one value per column. CSV has no types, so its
    values are all strings; they are separated by the one of ``DELIMITERS`` that finds the columns in the header.
    Raises DataError for an unusable file, some of it only while the records are read; the message names the file and,
    where there is one, the row, counted from 1 without a header. A ``.json`` file is held in memory as a whole, of a
    Parquet file a row group, of the others a line.
    """
    check_file(path)
    return READERS[path.suffix.lower()](path, columns)


def check_file(path: Path) -> None:
    """Raise DataError unless ``path`` is a readable file, not empty, in a known format."""
    if path.is_dir():
        raise DataError(f"data file {path}: is a folder, expected a file ({', '.join(READERS)})")
    if not path.exists():
        raise DataError(f"data file {path}: no such file")
    if path.suffix.lower() not in READERS:
        known = ", ".join(READERS)
        raise DataError(f"data file {path}: unknown extension {path.suffix!r} (known: {known})")
    if not path.is_file():
        raise DataError(f"data file {path}: not a regular file")
    if path.stat().st_size == 0:
        raise DataError(f"data file {path}: is empty")


def digest(path: Path) -> str:
    """Return the SHA-256 of the file's bytes in hexadecimal, followed by the extension, which decides the format.

    Raises DataError if the file cannot be read.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() + path.suffix.lower()
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
        raise _not_utf8(path) from None


def _not_utf8(path: Path) -> DataError:
    """Return the error for a file that is no UTF-8 text, which is read again up to the first byte that is none."""
    decoder, position, plain, block = codecs.getincrementaldecoder("utf-8")(), 0, True, b"?"
    with path.open("rb") as file:
        while block:
            block = file.read(BLOCK)
            position += len(block)
            try:
                plain &= decoder.decode(block, final=not block).isascii()
            except UnicodeDecodeError as error:
                content, start = error.object, error.start
                where = f"byte 0x{content[start]:02x} at offset {position - len(content) + start}"
                remedy = _conversion(path, content, plain and content[:start].isascii())
                return DataError(f"data file {path}: not UTF-8 text ({where}); {remedy}")
    return DataError(f"data file {path}: changed while it was read")


def _conversion(path: Path, content: bytes, plain: bool) -> str:
    """Say which encoding ``content`` looks like, and what to do; ``plain``: up to the wrong byte all was ASCII."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif not plain:
        return "it is UTF-8 up to there: correct that place"
    elif _is_western(content):
        encoding = "cp1252"
    else:
        return f"convert it, with its encoding for ENCODING: {_iconv(path, 'ENCODING')}"
    return f"it looks like {encoding}; convert it: {_iconv(path, encoding)}"


def _is_western(content: bytes) -> bool:
    """Whether these are mostly ASCII, the rest cp1252: the letters of other scripts are all outside of ASCII."""
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        return False
    return sum(map(str.isascii, text)) > 0.8 * len(text)


def _iconv(path: Path, encoding: str) -> str:
    new = path.with_name(f"{path.stem}-utf8{path.suffix}")
    return f"iconv -f {encoding} -t utf-8 {shlex.quote(str(path))} > {shlex.quote(str(new))}"


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
    found = ", ".join(map(str, names)) or "none"
    column = columns[setting]
    return f"no column {column!r}{nearest(column, names)} (found: {found}); name it with --set {setting}=NAME"


def _csv(path: Path, columns: Columns) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # by default no value may be longer than 128 KiB
    lines = _csv_lines(path, _delimiter(path, columns))
    header = next(lines, None)
    if header is None:
        raise DataError(f"data file {path}: holds no rows")
    positions = [_position(path, header, setting, columns) for setting in columns]
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


def _position(path: Path, names: list[str], setting: str, columns: Columns) -> int:
    """Return the index of the column that ``setting`` names among the file's column ``names``."""
    if columns[setting] not in names:
        raise DataError(f"data file {path}: {_missing(setting, names, columns)}")
    return names.index(columns[setting])


def _parquet(path: Path, columns: Columns) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # No threads: ranks are forked from this process, and a fork does not copy threads.
        file = pq.ParquetFile(path, pre_buffer=False)
        for setting in columns:
            _position(path, file.schema_arrow.names, setting, columns)
        names = list(dict.fromkeys(columns.values()))
        for batch in file.iter_batches(PARQUET_ROWS, columns=names, use_threads=False):
            yield from zip(*(batch.column(name).to_pylist() for name in columns.values()), strict=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data file {path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None


READERS: dict[str, Callable[[Path, Columns], Iterator[Record]]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""File extension to the function that reads such a file."""

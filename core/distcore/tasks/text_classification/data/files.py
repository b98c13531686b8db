"""Labelled texts from ``.json``, ``.jsonl``, ``.csv`` and ``.parquet``; whatever is wrong with a file is one line."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore.config import Columns
from distcore.errors import DataError, nearest

Pair = tuple[object, object]


@dataclass(frozen=True, slots=True)
class Rows:
    """Texts and their labels, in file order; ``name`` is what messages call them."""

    name: str
    texts: list[str]
    labels: list[int] | list[str]

    def __len__(self) -> int:
        return len(self.texts)


def read_rows(path: Path, columns: Columns) -> Rows:
    """Read a data file. Labels are all integers, counted from 0, or all strings; no text is blank.

    Raises DataError: the file, the row (counted from 1, without a header), what was found and what to do.
    """
    check_file(path)
    return check_rows(f"data file {path}", READERS[path.suffix.lower()](path, columns))


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
    """Return the SHA-256 of the file's bytes, and its extension, which says how they are read."""
    check_file(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() + path.suffix.lower()
    except OSError as error:
        raise _unreadable(path, error) from None


def check_rows(name: str, pairs: Iterable[Pair]) -> Rows:
    """Check texts and labels row by row; ``name`` opens every message."""
    texts: list[str] = []
    labels: list[Any] = []
    for number, (text, label) in enumerate(pairs, 1):
        problem = _text_problem(text) or _label_problem(label)
        if problem is None and labels and type(label) is not type(labels[0]):
            problem = f"label is {_kind(label)}, but row 1 has {_kind(labels[0])}: use one type throughout"
        if problem is not None:
            raise row_error(name, number, problem)
        texts.append(str(text))
        labels.append(label)
    if not texts:
        raise DataError(f"{name}: holds no rows")
    return Rows(name, texts, labels)


def row_error(name: str, number: int, problem: str) -> DataError:
    """The error for row ``number``, counted from 1."""
    return DataError(f"{name}, row {number}: {problem}")


def _text_problem(text: object) -> str | None:
    if not isinstance(text, str):
        return f"text is {_kind(text)}, expected a string"
    if not text or text.isspace():
        return "text is empty: fill it in or remove the row"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"text is not valid Unicode: lone surrogate at character {error.start + 1}"
    return None


def _label_problem(label: object) -> str | None:
    if type(label) is int:
        return f"label {label} is out of range: integer labels count from 0" if label < 0 else None
    if isinstance(label, str):
        return None if label.strip() else "label is empty"
    return f"label is {_kind(label)}, expected an integer or a string"


def _kind(value: object) -> str:
    """``value`` as a person would call it, with a glimpse of it."""
    if value is None:
        return "missing (null)"
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)} values"
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string"}
    glimpse = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
    return f"{names.get(type(value), type(value).__name__)} ({glimpse})"


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(f"data file {path}: not UTF-8 text (byte 0x{byte:02x} at offset {error.start})") from None


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data file {path}: cannot be read: {error.strerror or error}")


def _json(path: Path, columns: Columns) -> Iterator[Pair]:
    tree = _parse(path, _read_text(path), 1)
    if not isinstance(tree, list):
        raise DataError(f"data file {path}: expected a list of [text, label] rows, found {_kind(tree)}")
    return (_pair(path, number, row, columns) for number, row in enumerate(tree, 1))


def _jsonl(path: Path, columns: Columns) -> Iterator[Pair]:
    number = 0
    # Not splitlines(): JSON strings may hold U+2028 and its like unescaped.
    for line_number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            number += 1
            yield _pair(path, number, _parse(path, line, line_number), columns)


def _parse(path: Path, text: str, line: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {line + error.lineno - 1}, column {error.colno}"
        raise DataError(f"data file {path}, {where}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"data file {path}, line {line}: not usable JSON: {error}") from None


def _pair(path: Path, number: int, row: object, columns: Columns) -> Pair:
    """Take text and label out of ``[text, label]`` or of an object with the configured names."""
    if isinstance(row, list) and len(row) == 2:
        return row[0], row[1]
    name = f"data file {path}"
    if isinstance(row, dict):
        for key in (columns.text, columns.label):
            if key not in row:
                raise row_error(name, number, _missing(key, row, columns))
        return row[columns.text], row[columns.label]
    expected = f'[text, label] or {{"{columns.text}": …, "{columns.label}": …}}'
    raise row_error(name, number, f"expected {expected}, found {_kind(row)}")


def _missing(key: str, names: Iterable[str], columns: Columns) -> str:
    names = list(names)
    field = "text" if key == columns.text else "label"
    found = ", ".join(map(str, names)) or "none"
    return f"no column {key!r}{nearest(key, names)} (found: {found}); name it with --set columns.{field}=NAME"


def _csv(path: Path, columns: Columns) -> Iterator[Pair]:
    lines = list(_csv_lines(path))
    if not lines:
        raise DataError(f"data file {path}: holds no rows")
    header = lines[0]
    text, label = (_position(path, header, key, columns) for key in (columns.text, columns.label))
    for number, line in enumerate(lines[1:], 1):
        if len(line) != len(header):
            problem = f"expected {len(header)} values as in the header, found {len(line)}"
            raise row_error(f"data file {path}", number, problem)
    labels = _as_integers([line[label] for line in lines[1:]])
    return zip((line[text] for line in lines[1:]), labels, strict=True)


def _csv_lines(path: Path) -> Iterator[list[str]]:
    csv.field_size_limit(2**31 - 1)  # a text may be longer than csv's own 128 KiB
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    try:
        yield from (line for line in reader if line)
    except csv.Error as error:
        raise DataError(f"data file {path}, line {reader.line_num}: not valid CSV: {error}") from None


def _position(path: Path, names: list[str], key: str, columns: Columns) -> int:
    if key not in names:
        raise DataError(f"data file {path}: {_missing(key, names, columns)}")
    return names.index(key)


def _as_integers(labels: list[str]) -> list[int] | list[str]:
    """CSV has no types: labels are integers if every one is written as an integer is."""
    if all(re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", label) for label in labels):
        return [int(label) for label in labels]
    return labels


def _parquet(path: Path, columns: Columns) -> Iterator[Pair]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # No threads: ranks are forked from this process.
        file = pq.ParquetFile(path, pre_buffer=False)
        for key in (columns.text, columns.label):
            _position(path, file.schema_arrow.names, key, columns)
        table = file.read(columns=[columns.text, columns.label], use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data file {path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
    return zip(table.column(columns.text).to_pylist(), table.column(columns.label).to_pylist(), strict=True)


READERS: dict[str, Callable[[Path, Columns], Iterator[Pair]]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""How each extension is read."""

"""Rows of JSON files and of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from distcore import DataError
from distcore.files import unique_json
from distcore_data.formats.blocks import ParseLine, TakeFromBlock, rows_of_lines
from distcore_data.formats.columns import (
    EVERY_COLUMN,
    OPTIONAL_COLUMN,
    SKIPPED,
    Columns,
    Record,
    RowError,
    as_list,
    describe_value,
    record,
    required,
    row_error,
    tried,
    until_cut,
)
from distcore_data.formats.opening import extension, text_lines
from distcore_data.formats.places import START, Place
from distcore_data.formats.row_limit import LINE, TooLong

SAMPLE = 100
"""Rows of a file of which the names of the columns are looked at."""


def read_json(
    path: Path, columns: Columns, place: Place = START, wanted: Container[int] | None = None
) -> Iterator[Record | RowError]:
    """Yield the rows of a file that is one list, or has a row per line, from ``place`` on."""
    if has_a_row_per_line(path):
        return read_jsonl(path, columns, place, wanted)
    tree = _tree(path)
    if isinstance(tree, dict) and all(column in tree for column in required(columns).values()):
        tree = [tree]  # a file of one line
    if not isinstance(tree, list):
        raise DataError(
            f"data file {path}: expected a list of {as_list(columns)} rows, found"
            f" {describe_value(tree)}"
        )
    name = f"data file {path}"
    return (
        tried(partial(record, name, number, row, columns)) for number, row in enumerate(tree, 1)
    )


def json_columns(path: Path) -> list[str]:
    """Return the keys of the first ``SAMPLE`` rows of a file."""
    read = read_json if extension(path) == ".json" else read_jsonl
    rows = until_cut(read(path, {f"columns.every{OPTIONAL_COLUMN}": EVERY_COLUMN}))
    names = dict[str, None]()
    for row in islice(rows, SAMPLE):
        if not isinstance(row, RowError):
            names |= dict.fromkeys(row[0] if isinstance(row[0], dict) else ())
    return [*names]


def list_rows(path: Path) -> int:
    """Return the number of rows of a file that is one list, or one row."""
    tree = _tree(path)
    return len(tree) if isinstance(tree, list) else 1


def _tree(path: Path) -> object:
    return _parse(path, "".join(text_lines(path, "", bounded=False)), 1)


def has_a_row_per_line(path: Path) -> bool:
    """Return True if the first line is whole by itself and others follow, as the
    scripts of transformers write them.
    """
    lines = (line for line in text_lines(path, "\n") if line.strip())
    first, second = next(lines, ""), next(lines, "")
    try:
        return bool(second) and json.loads(first) is not None
    except (ValueError, RecursionError):
        return False


def read_jsonl(
    path: Path, columns: Columns, place: Place = START, wanted: Container[int] | None = None
) -> Iterator[Record | RowError]:
    """Yield the rows of JSON lines from ``place`` on, ``SKIPPED`` for those
    that are not ``wanted``.
    """
    parse, number = json_line(path, columns), place.row
    for line_number, line in enumerate(text_lines(path, "\n", place), place.inner + 1):
        if line.isspace():
            continue
        number += 1
        if wanted is None or number - 1 in wanted:
            yield tried(partial(parse, line, number, line_number))
        else:
            yield SKIPPED


def json_line(path: Path, columns: Columns) -> ParseLine:
    """Return what makes the record of a line of a file. Raises RowError for a bad one."""
    name = f"data file {path}"

    def parse(line: str, number: int, line_number: int) -> Record:
        if isinstance(line, TooLong):
            raise row_error(name, number, LINE())
        return record(name, number, _parse(path, line.removesuffix("\n"), line_number), columns)

    return parse


def open_json_lines(path: Path, columns: Columns) -> TakeFromBlock:
    """Return what takes rows of a file of JSON lines out of its blocks."""
    return rows_of_lines(json_line(path, columns))


def _parse(path: Path, text: str, line: int) -> object:
    try:
        return unique_json(text)
    except json.JSONDecodeError as error:
        where = f"line {line + error.lineno - 1}, column {error.colno}"
        raise RowError(f"data file {path}, {where}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"data file {path}, line {line}: not usable JSON: {error}") from None

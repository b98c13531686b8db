"""Rows of CSV files, whose delimiter is told from the header."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from distcore import DataError
from distcore_data.encodings import not_utf8
from distcore_data.formats.blocks import Block, TakeFromBlock
from distcore_data.formats.columns import (
    Columns,
    Record,
    RowError,
    known_columns,
    missing,
    position,
    required,
    row_error,
    tried,
    with_nulls,
)
from distcore_data.formats.opening import (
    BROKEN,
    TABS,
    broken,
    text_lines,
    written_extension,
)
from distcore_data.formats.places import START, Place
from distcore_data.formats.row_limit import LINE, TooLong, bounded_lines, most_bytes

DELIMITERS = ",;\t"
"""Delimiters of a CSV file; the first that fits is taken."""
HEADER_ROWS = 1000
"""Rows below the first line that are looked at to tell whether it is a header."""
SENTENCE = 5
"""Words from which on a name of a column may be a text."""


def read_csv(path: Path, columns: Columns, place: Place = START) -> Iterator[Record | RowError]:
    """Yield the rows of a CSV file from ``place`` on, as strings."""
    delimiter = csv_delimiter(path, columns)
    lines = _csv_lines(path, delimiter)
    header = _header(path, lines)
    if place.is_start and set(columns.values()).isdisjoint(header):
        _check_header(path, header, lines, columns)
    parse = _parse_line(path, header, columns)
    if not place.is_start:
        lines = _csv_lines(path, delimiter, place)
    for number, line in enumerate(lines, place.row + 1):
        yield line if isinstance(line, RowError) else tried(partial(parse, line, number))


def _header(path: Path, lines: Iterator[list[str] | RowError]) -> list[str]:
    """Return the first line of a file. Raises DataError."""
    header = next(lines, None)
    if header is None:
        raise DataError(f"data file {path}: holds no rows")
    if isinstance(header, RowError):
        raise header
    return header


def _parse_line(
    path: Path, header: Sequence[str], columns: Columns
) -> Callable[[list[str], int], Record]:
    """Return what makes a record of the values of a line, which is the row of a number from 1.
    It raises RowError for a bad one. Raises DataError for columns that the header does not have.
    """
    name = f"data file {path}"
    there = known_columns(columns, header)
    positions = [position(name, header, setting, there) for setting in there]
    if twice := [header[place] for place in positions if header.count(header[place]) > 1]:
        raise DataError(f"{name}: two columns are named {twice[0]!r}; rename one of them")

    def parse(line: list[str], number: int) -> Record:
        if line == header and len(line) > 1:
            repeated = "repeats the header, as where files were joined; remove it"
            raise row_error(name, number, repeated)
        if len(line) != len(header):
            problem = f"expected {len(header)} values as in the header, found {len(line)}"
            raise row_error(name, number, problem)
        return with_nulls((line[place] for place in positions), there, columns)

    return parse


def open_csv(path: Path, columns: Columns) -> TakeFromBlock | None:
    """Return what takes rows of a file out of its blocks; ``None`` if its columns tell another
    delimiter than the index took. Raises DataError.
    """
    delimiter = csv_delimiter(path, columns)
    if delimiter != csv_delimiter(path, {}):
        return None
    parse = _parse_line(path, _header(path, _csv_lines(path, delimiter)), columns)

    def take(block: Block, numbers: Sequence[int]) -> list[Record | None]:
        values = _values_of(block, numbers, delimiter)
        if values is None:
            return [None] * len(numbers)
        return [
            parse(line, block.rows_before + number + 1)
            for number, line in zip(numbers, values, strict=True)
        ]

    return take


def _is_plain(block: Block) -> bool:
    """Return True if no value is quoted, and each line ends with a line feed: not as on old Macs,
    with a carriage return alone.
    """
    return b'"' not in block.content and block.content.count(b"\n") == block.lines


def _values_of(block: Block, numbers: Sequence[int], delimiter: str) -> list[list[str]] | None:
    """Return the values of some rows of a block; ``None`` if it is no valid CSV up to the last."""
    try:
        if block.has_no_blank_line and _is_plain(block):
            lines = [line.decode() for line in block.lines_at(numbers)]
            return list(csv.reader(lines, delimiter=delimiter, strict=True))
        text = io.StringIO(block.content.decode(), newline="")
        filled = filter(None, csv.reader(text, delimiter=delimiter, strict=True))
        first = list(islice(filled, numbers[-1] + 1))
    except csv.Error:
        return None
    return [first[number] for number in numbers]


def _check_header(
    path: Path, header: Sequence[str], lines: Iterator[list[str] | RowError], columns: Columns
) -> None:
    """Raise DataError if the first line, which has none of the columns, is a row, or may be one.

    Names of columns may have spaces, and may be years, so only a value that other rows share
    decides. A line put above
    a header would make a class of it: where nothing decides, the user does.
    """
    if not required(columns):
        return
    names = _header_of(columns, header)
    if shared := _shared_value(header, lines):
        what = f"its first line is no header but a row, because other rows have {shared!r}, too"
        raise DataError(f"data file {path}: {what}; add the line {names} above it")
    if any(_is_number(value) or len(value.split()) >= SENTENCE for value in header):
        setting = next(iter(required(columns)))
        choice = f"if the first line is a row and no header, add the line {names} above it"
        raise DataError(f"data file {path}: {missing(setting, header, columns)}; {choice}")


def _header_of(columns: Columns, header: Sequence[str]) -> str:
    """Return a header for rows like ``header``: the columns asked for, and others by number."""
    names = [columns[setting] for setting in required(columns)]
    return ",".join(
        [*names, *(f"column{number}" for number in range(len(names) + 1, len(header) + 1))]
    )


def _shared_value(header: Sequence[str], lines: Iterator[list[str] | RowError]) -> str | None:
    """Return a value of the first line that another of the first rows has in the same
    column; ``None`` without one.
    """
    for line in islice(lines, HEADER_ROWS):
        if isinstance(line, RowError) or len(line) != len(header) or line == header:
            continue
        for value, below in zip(header, line, strict=True):
            if value.strip() and value == below:
                return value
    return None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", text) is not None


def csv_delimiter(path: Path, columns: Columns) -> str:
    """Return the delimiter with which the header has all columns, else the one with the most
    columns of any name; of a ``.tsv`` file a tab.
    """

    def fit(delimiter: str) -> tuple[bool, int]:
        lines = csv.reader(text_lines(path, ""), delimiter=delimiter)
        header = next(filter(None, lines), [])
        return set(required(columns).values()) <= set(header), len(header)

    has_tabs = written_extension(path) == TABS
    return "\t" if has_tabs else max(DELIMITERS, key=fit)


def csv_columns(path: Path) -> list[str]:
    """Return the names in the header of a file."""
    header = next(_csv_lines(path, csv_delimiter(path, {})), [])
    return [] if isinstance(header, RowError) else header


def record_places(path: Path, stream: Any) -> Iterator[Place]:
    """Yield the place of each row, with the delimiter of most columns. ``stream``:
    the open file, decompressed.
    """
    read = [0, 0]

    def count(text: str) -> None:
        read[0] += len(text) if text.isascii() else len(text.encode())

    def lines() -> Iterator[str]:
        with io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
            for line in bounded_lines(text, count):
                if not isinstance(line, TooLong):
                    count(line)
                read[1] += 1
                yield line.removeprefix("\ufeff") if read[1] == 1 else line

    try:
        reader, row, before = _parsed(path, lines(), csv_delimiter(path, {})), -1, (0, 0)
        for _ in reader:
            if row >= 0:
                yield Place(row, *before)
            row, before = row + 1, (read[0], read[1])
    except BROKEN as error:
        raise broken(f"data file {path}", error, "cannot be read: ") from None
    except UnicodeDecodeError:
        raise not_utf8(path) from None


def _csv_lines(path: Path, delimiter: str, place: Place = START) -> Iterator[list[str] | RowError]:
    return _parsed(path, text_lines(path, "", place), delimiter, place.inner)


def _parsed(
    path: Path, lines: Iterator[str], delimiter: str, before: int = 0
) -> Iterator[list[str] | RowError]:
    """Yield the values of each record that is not empty. ``before``: number
    of lines before them.
    """
    # by default no value may be longer than 128 KiB
    csv.field_size_limit(min(most_bytes(), 2**31 - 1))
    last = ""

    def told() -> Iterator[str]:
        nonlocal last
        for last in lines:  # noqa: UP028  # the last one is looked at
            yield last

    reader = csv.reader(told(), delimiter=delimiter, strict=True)
    while True:
        began = reader.line_num + 1
        try:
            if line := next(reader):
                yield line
        except StopIteration:
            return
        except csv.Error as error:  # the reader goes on with the next line
            line_too_long = last if isinstance(last, TooLong) else None
            if line_too_long is not None or "field limit" in str(error):
                too_long = RowError(f"data file {path}, line {before + reader.line_num}: {LINE()}")
                if (
                    line_too_long is None
                    or line_too_long.has_open_quote
                    or began != reader.line_num
                ):
                    raise too_long from None  # a value goes on, nobody knows how long
                yield too_long
                continue
            # a quote that is not closed takes in all lines after it
            cut = "unexpected end" in str(error)
            at, what = (
                (began, "a quote opens here and never closes") if cut else (reader.line_num, error)
            )
            yield RowError(f"data file {path}, line {before + at}: not valid CSV: {what}")

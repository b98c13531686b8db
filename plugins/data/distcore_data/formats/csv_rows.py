"""Rows of CSV files, whose delimiter is told from the header."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from distcore import DataError
from distcore_data.formats.columns import Columns, Record, RowError, position, row_error
from distcore_data.formats.opening import text_lines

DELIMITERS = ",;\t"
"""Delimiters of a CSV file; the first that fits is taken."""


def read_csv(path: Path, columns: Columns) -> Iterator[Record | RowError]:
    """Yield the rows of a CSV file, as strings."""
    csv.field_size_limit(2**31 - 1)  # by default no value may be longer than 128 KiB
    lines = _csv_lines(path, _delimiter(path, columns))
    header = next(lines, None)
    if header is None or isinstance(header, RowError):
        raise header or DataError(f"data file {path}: holds no rows")
    positions = [position(f"data file {path}", header, setting, columns) for setting in columns]
    for number, line in enumerate(lines, 1):
        if isinstance(line, RowError):
            yield line
        elif len(line) != len(header):
            problem = f"expected {len(header)} values as in the header, found {len(line)}"
            yield row_error(f"data file {path}", number, problem)
        else:
            yield tuple(line[place] for place in positions)


def _delimiter(path: Path, columns: Columns) -> str:
    """Return the delimiter with which the header has all columns, else the one with the most columns of any name."""

    def fit(delimiter: str) -> tuple[bool, int]:
        lines = csv.reader(text_lines(path, ""), delimiter=delimiter)
        header = next(filter(None, lines), [])
        return set(columns.values()) <= set(header), len(header)

    return max(DELIMITERS, key=fit)


def _csv_lines(path: Path, delimiter: str) -> Iterator[list[str] | RowError]:
    reader = csv.reader(text_lines(path, ""), delimiter=delimiter, strict=True)
    while True:
        try:
            if line := next(reader):
                yield line
        except StopIteration:
            return
        except csv.Error as error:  # the reader goes on with the next line
            yield RowError(f"data file {path}, line {reader.line_num}: not valid CSV: {error}")

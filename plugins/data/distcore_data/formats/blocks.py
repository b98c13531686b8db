"""Rows of text files by number: what stands between two places of the index is read at once."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distcore import DataError
from distcore_data.encodings import not_utf8
from distcore_data.formats.columns import Columns, Record
from distcore_data.formats.places import Place
from distcore_data.formats.row_limit import most_bytes

SPAN = 2**20
"""Most bytes between two places that are read at once. Rows of longer blocks are read line by line.
"""
FEW = 4
"""Lines of a block from which on it is split into all of them."""
UNKNOWN = -1
"""Number of lines of the last block of a file, which the index does not tell."""


class Block(NamedTuple):
    """What stands between two places of a file."""

    content: bytes
    """The bytes, without a mark of the encoding."""
    rows_before: int
    """Number of rows of the file before it."""
    lines_before: int
    """Number of lines of the file before it."""
    rows: int
    """Number of its rows."""
    lines: int
    """Number of its lines, or ``UNKNOWN``."""

    @property
    def has_no_blank_line(self) -> bool:
        """True if each line is known to be a row."""
        return self.lines == self.rows

    def lines_at(self, numbers: Sequence[int]) -> list[bytes]:
        """Return some lines, counted from 0, of a block that tells how many it has."""
        if len(numbers) < FEW:
            return [self._line(number) for number in numbers]
        lines = self.content.split(b"\n")
        return [lines[number] for number in numbers]

    def _line(self, number: int) -> bytes:
        """Return one line, found from the nearer end, so that no other one is copied."""
        content = self.content
        if number < self.lines // 2:
            begin = 0
            for _ in range(number):
                begin = content.index(b"\n", begin) + 1
            return content[begin : content.index(b"\n", begin)]
        end = len(content) - 1  # a line feed, as only the last block of a file may lack one
        for _ in range(self.lines - 1 - number):
            end = content.rindex(b"\n", 0, end)
        return content[content.rfind(b"\n", 0, end) + 1 : end]


TakeFromBlock = Callable[[Block, Sequence[int]], Sequence[Record | None]]
"""Return the rows of these numbers, counted from the block's first; ``None`` for one that only a
reader of all lines has. Raises RowError for a bad one.
"""
ParseLine = Callable[[str, int, int], Record]
"""Make the record of a line: its text, number of the row and number of the line, both from 1."""
OpenBlocks = Callable[[Path, Columns], TakeFromBlock | None]
"""Prepare to take rows of a file; ``None`` if its index has no use. Raises DataError for columns
that the file does not have.
"""


def longest_block() -> int:
    """Return the most bytes that are read at once: no line among them is over the limit."""
    return min(SPAN, most_bytes())


def take_between(
    path: Path,
    places: np.ndarray,
    rows: int,
    numbers: np.ndarray,
    take: TakeFromBlock,
    longest: int,
) -> list[Record | None]:
    """Return the rows ``numbers``, int64, ascending, of a file of so many rows; ``None`` for those
    that have to be read line by line.

    ``places``: those of the file's index. ``longest``: most bytes that are read at once. Raises
    DataError for a bad row, and OSError.
    """
    taken = list[Record | None]()
    file = os.open(path, os.O_RDONLY)
    try:
        end = Place(rows, os.fstat(file).st_size, UNKNOWN)
        for (row, start, line), (end_row, stop, end_line), inside in _blocks(places, end, numbers):
            size = stop - start
            if size > longest:
                taken += [None] * len(inside)
                continue
            content = os.pread(file, max(size, 0), start)
            if len(content) != size:
                raise _changed(path)
            if start == 0:
                content = content.removeprefix(codecs.BOM_UTF8)
            lines = UNKNOWN if end_line == UNKNOWN else end_line - line
            taken += take(Block(content, row, line, end_row - row, lines), inside)
    except UnicodeDecodeError:
        raise not_utf8(path) from None
    except (IndexError, ValueError):  # of a line that is not there
        raise _changed(path) from None
    finally:
        os.close(file)
    return taken


def _changed(path: Path) -> DataError:
    return DataError(f"data file {path}: changed while it was read")


def _blocks(
    places: np.ndarray, end: Place, numbers: np.ndarray
) -> Iterator[tuple[Sequence[int], Sequence[int], list[int]]]:
    """Yield the fields of the places where each block begins and ends that has some of the
    ``numbers``, with these, counted from its first row.

    ``end``: the end of the file.
    """
    before = places[:, 0].searchsorted(numbers, "right") - 1
    changes = np.flatnonzero(before[1:] != before[:-1]) + 1
    firsts = [0, *changes.tolist()]
    chosen, last = before[firsts], len(places) - 1
    begins = places[chosen].tolist()
    ends: list[Sequence[int]] = places[np.minimum(chosen + 1, last)].tolist()
    if chosen[-1] == last:
        ends[-1] = end
    wanted = numbers.tolist()
    bounds = pairwise([*firsts, len(wanted)])
    for (first, stop), begin, following in zip(bounds, begins, ends, strict=True):
        row = begin[0]
        yield begin, following, [number - row for number in wanted[first:stop]]


def rows_of_lines(parse: ParseLine) -> TakeFromBlock:
    """Return what takes rows of a file with a row per line that is not blank."""

    def take(block: Block, numbers: Sequence[int]) -> list[Record | None]:
        if block.has_no_blank_line:
            lines, places = block.lines_at(numbers), numbers
        else:
            every = block.content.split(b"\n")
            filled = [place for place, line in enumerate(every) if line.decode().strip()]
            places = [filled[number] for number in numbers]
            lines = [every[place] for place in places]
        row, first_line = block.rows_before + 1, block.lines_before + 1
        return [
            parse(line.decode(), row + number, first_line + place)
            for line, number, place in zip(lines, numbers, places, strict=True)
        ]

    return take

"""Rows of Arrow batches by number: values are read where they lie, one row at a time, and
nothing else is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from distcore_data.formats.arrow_columns import Chosen
from distcore_data.formats.class_names import Name
from distcore_data.formats.columns import NOTHING, Record, inside, with_nulls
from distcore_data.formats.row_limit import most_bytes

MOST, BYTES = 2**14, 2**26
"""Most batches of all files that stay opened, and most bytes that they take,
decompressed, besides mapped files.
"""
NUMBERS = {
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "float": "f",
    "double": "d",
}
"""Types of columns to the formats of their values in memory."""
ROW = 64
"""Bytes of a value of which an array of one row needs more."""
TOO_LONG = "over the limit, or damaged"
OFFSETS = {"string": "i", "binary": "i", "large_string": "q", "large_binary": "q"}
"""Types of columns of texts or bytes to the formats of their offsets."""
Value = Callable[[int], object]
"""Return the value of a row. Raises an exception where it cannot: a reader of all rows says why."""


class Opened(NamedTuple):
    """A batch whose values can be read."""

    rows: int
    """Number of its rows."""
    values: list[Value]
    """Of each column that is asked for."""
    size: int
    """Bytes that it takes besides a mapped file."""


class NumberedBatches:
    """The batches of a file, whose rows are read by number."""

    def __init__(
        self, batch: Callable[[int], Any], chosen: Chosen, starts: np.ndarray | None = None
    ) -> None:
        """Read the columns ``chosen``. ``batch`` returns a batch by its number. ``starts``: the
        first row of each.
        """
        self._batch, self._chosen, self._starts = batch, chosen, starts

    def take(self, parts: np.ndarray | None, rows: np.ndarray) -> list[Record]:
        """Return some rows. A row may be in a later batch than its own. Raises an exception if
        one cannot be read.

        ``parts`` and ``rows``: the batch of each, and its number from there on, int64 ``(n,)``.
        Without ``parts`` rows are counted from the first batch on.
        """
        if parts is None:
            assert self._starts is not None
            parts = self._starts.searchsorted(rows, "right") - 1
            rows = rows - self._starts[parts]
        last, batch, values, places = -1, Opened(0, [], 0), list[list[Value]](), list[int]()
        for part, row in zip(parts.tolist(), rows.tolist(), strict=True):
            if part != last:
                last, batch = part, self._opened(part)
            while row >= batch.rows:
                last, row = last + 1, row - batch.rows
                batch = self._opened(last)
            values.append(batch.values)
            places.append(row)
        # Column after column takes less time than row after row.
        columns = [
            [of[column](row) for of, row in zip(values, places, strict=True)]
            for column in range(len(self._chosen.places))
        ]
        rows_taken = list(zip(*columns, strict=True))
        if len(self._chosen.columns) == len(self._chosen.asked):
            return rows_taken
        return [with_nulls(row, self._chosen.columns, self._chosen.asked) for row in rows_taken]

    def _opened(self, number: int) -> Opened:
        """Return a batch, and keep it as the one that was asked for last."""
        key = self, number
        opened = _KEPT.pop(key, None)
        if opened is None:
            opened = self._made(number)
            size = opened.size + sum(other.size for other in list(_KEPT.values()))
            while _KEPT and (size > BYTES or len(_KEPT) >= MOST):
                size -= _KEPT.pop(next(iter(_KEPT))).size
        _KEPT[key] = opened
        return opened

    def _made(self, number: int) -> Opened:
        import pyarrow as pa

        before, chosen = pa.total_allocated_bytes(), self._chosen
        batch = self._batch(number)
        most = most_bytes() // (len(chosen.places) or 1) - ROW
        values = list[Value]()
        for place, top, column, name_of in zip(
            chosen.places, chosen.tops, chosen.columns.values(), chosen.names, strict=True
        ):
            value = _value(batch.column(place), most)
            value = value if column == top else _inside(value, column.split(".")[1:])
            values.append(_named(value, name_of) if name_of else value)
        return Opened(batch.num_rows, values, max(0, pa.total_allocated_bytes() - before))


_KEPT = dict[tuple[NumberedBatches, int], Opened]()
"""Opened batches, the one last that was asked for last."""


def forget_batches() -> None:
    """Close all batches."""
    _KEPT.clear()


def _value(column: Any, most: int) -> Value:
    """Return what reads the values of a column, as its ``to_pylist`` has them, of at
    most so many bytes.
    """
    kind, buffers = str(column.type), column.buffers()
    if column.offset or column.null_count:
        return _any_value(column, most)
    if kind in NUMBERS:
        numbers: Value = _array(buffers[1], NUMBERS[kind]).__getitem__
        return numbers
    if kind in OFFSETS:
        offsets, content = _array(buffers[1], OFFSETS[kind]), _array(buffers[2], "B")
        if _are_offsets(np.asarray(offsets[: len(column) + 1]), len(content), most):
            return _texts(offsets, content) if "string" in kind else _contents(offsets, content)
    return _any_value(column, most)


def _are_offsets(offsets: np.ndarray, size: int, most: int) -> bool:
    """Return True if values lie one after the other in so many bytes, each of at most ``most``."""
    sizes = np.diff(offsets)
    return len(sizes) > 0 and bool(
        offsets[0] >= 0 <= sizes.min() <= sizes.max() <= most and offsets[-1] <= size
    )


def _array(buffer: Any, form: str) -> Any:
    """Return the numbers in a buffer, without a copy."""
    content: Any = memoryview(buffer or b"")
    return content[: content.nbytes - content.nbytes % struct.calcsize(form)].cast(form)


def _any_value(column: Any, most: int) -> Value:
    def value(row: int) -> object:
        one = column.slice(row, 1)
        if one.nbytes > most:
            raise ValueError(TOO_LONG)
        return one.to_pylist()[0]

    return value


def _texts(offsets: Any, content: Any) -> Value:
    return lambda row: str(content[offsets[row] : offsets[row + 1]], "utf-8")


def _contents(offsets: Any, content: Any) -> Value:
    return lambda row: bytes(content[offsets[row] : offsets[row + 1]])


def _inside(top: Value, names: list[str]) -> Value:
    """Return what reads a column inside another."""

    def value(row: int) -> object:
        chosen = inside(top(row), names)
        if chosen is NOTHING:
            raise KeyError(names[-1])
        return chosen

    return value


def _named(number: Value, name_of: Name) -> Value:
    """Return what reads a value with the names of its classes."""
    return lambda row: name_of(number(row))

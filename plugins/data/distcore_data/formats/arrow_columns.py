"""Columns of Arrow, in which Parquet files, Arrow files and chunks of litdata
are decoded, as records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from distcore import DataError
from distcore_data.formats.class_names import Name, column_names
from distcore_data.formats.columns import (
    NOTHING,
    Columns,
    Record,
    RowError,
    dotted,
    inside,
    known_columns,
    missing,
    position,
    row_error,
    with_nulls,
)
from distcore_data.formats.opening import reason
from distcore_data.formats.row_limit import most_bytes, over_limit

DECODED_ROWS = 1024
"""Rows of a file that are decoded at a time."""
UNREADABLE = (OSError, KeyError, ValueError, OverflowError)
"""Other exceptions of pyarrow: for invalid UTF-8, impossible dates."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The columns that are asked for, of batches with one schema."""

    columns: Columns
    """Their names, as the user has them, of those that are there."""
    asked: Columns
    """The same with those that are not there, whose values are null."""
    places: list[int]
    """Place in the schema of each, or of the column that it is inside of."""
    tops: list[str]
    """Name of the column at each place."""
    names: list[Name | None]
    """What names the classes in each; ``None`` for most."""

    @classmethod
    def from_schema(cls, name: str, schema: Any, columns: Columns) -> Chosen:
        """Return the columns of a schema, with the names of classes
        that it keeps. Raises DataError.

        ``name``: the source.
        """
        there, asked = schema.names, columns
        columns = known_columns(asked, there)
        places = [position(name, there, setting, columns) for setting in columns]
        tops = [there[place] for place in places]
        if twice := next((top for top in tops if there.count(top) > 1), None):
            raise DataError(f"{name}: two columns are named {twice!r}; rename one of them")
        names = [
            column_names(schema, column, top)
            for column, top in zip(columns.values(), tops, strict=True)
        ]
        return cls(columns, asked, places, tops, names)


def records(name: str, start: int, batch: Any, chosen: Chosen) -> Iterator[Record | RowError]:
    """Yield the rows of a batch, the first of number ``start``; each is decoded alone
    if some cannot be.
    """
    try:
        rows = decoded(name, start, batch, chosen)
    except (RowError, *UNREADABLE) as error:
        if batch.num_rows == 1:
            yield error if isinstance(error, RowError) else row_error(name, start, reason(error))
            return
        for row in range(batch.num_rows):
            yield from records(name, start + row, batch.slice(row, 1), chosen)
    else:
        yield from rows


def decoded(name: str, start: int, batch: Any, chosen: Chosen) -> Iterable[Record]:
    """Return the rows of a batch. Raises RowError, or an exception of pyarrow for all of them."""
    if not chosen.places:
        return [with_nulls((), chosen.columns, chosen.asked)] * batch.num_rows
    arrays = [batch.column(place) for place in chosen.places]
    # of many rows perhaps, which are tried alone
    if (size := sum(array.nbytes for array in arrays)) > most_bytes():
        raise row_error(name, start, over_limit(size))
    values = list[list[Any]]()
    for array, top, setting, name_of in zip(
        arrays, chosen.tops, chosen.columns, chosen.names, strict=True
    ):
        column = _values(name, array, top, setting, chosen.columns)
        values.append(list(map(name_of, column)) if name_of else column)
    if len(chosen.columns) == len(chosen.asked):
        return zip(*values, strict=True)
    return [with_nulls(row, chosen.columns, chosen.asked) for row in zip(*values, strict=True)]


def _values(name: str, column: Any, top: str, setting: str, columns: Columns) -> list[Any]:
    """Return the values of an Arrow column or, where ``setting`` names a column inside
    ``top``, of that one.
    """
    values: list[Any] = column.to_pylist()
    if columns[setting] == top:
        return values
    chosen = [inside(value, columns[setting].split(".")[1:]) for value in values]
    if NOTHING in chosen:
        row = {top: values[chosen.index(NOTHING)]}
        raise DataError(f"{name}: {missing(setting, dotted(row), columns)}")
    return chosen

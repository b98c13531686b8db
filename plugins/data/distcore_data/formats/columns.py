"""Columns of a row: their values in a record, and the messages for those that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from distcore import DataError, nearest

NOTHING = object()
"""A missing column of a row, as opposed to null."""
Record = tuple[object, ...]
OPTIONAL_COLUMN = "?"
"""Ends the config key of a column that a row, or a whole file, may lack. Then its value is null."""
EVERY_COLUMN = "*"
"""In place of a column's name: the whole row of a JSON file."""
SKIPPED: Record = ()
"""In place of a row that nobody asked for, so that it need not be decoded."""
Columns = Mapping[str, str]
"""The config key that names a column (``columns.text``) to the column's name, in the order
of a record's values.
"""


def is_optional(setting: str) -> bool:
    """Return True for the config key of a column that may be missing."""
    return setting.endswith(OPTIONAL_COLUMN)


def required(columns: Columns) -> dict[str, str]:
    """Return the columns that no row may lack."""
    return {setting: column for setting, column in columns.items() if not is_optional(setting)}


def known_columns(columns: Columns, names: Sequence[str]) -> dict[str, str]:
    """Return ``columns`` without the optional ones that are not among the ``names`` of a source."""
    return {
        setting: column
        for setting, column in columns.items()
        if not is_optional(setting) or column in names or column.split(".")[0] in names
    }


def with_nulls(values: Iterable[object], there: Columns, columns: Columns) -> Record:
    """Return the values of the columns ``there`` as a record of all ``columns``, with
    null for the others.
    """
    if len(there) == len(columns):
        return tuple(values)
    own = dict(zip(there, values, strict=True))
    return tuple(own.get(setting) for setting in columns)


class RowError(DataError):
    """The error of one row, or of several. A reader that yields it, rather than raising it,
    goes on after it.
    """

    rows: int = 1
    """The number of rows in whose place it is."""


class CutError(RowError):
    """The error of a row and of all after it in a file: a reader cannot go on after it."""

    rows = 0


class TwiceError(RowError):
    """The error of a row whose key an earlier one of its file has. A reader from the start of
    the file notices it.
    """


def row_error(name: str, number: int, problem: str) -> RowError:
    """Return the error for row ``number``, counted from 1, of the source ``name``."""
    return RowError(f"{name}, row {number}: {problem}")


def until_cut(rows: Iterator[Record | RowError]) -> Iterator[Record | RowError]:
    """Yield the rows of a file, and last the error of one after which the reader cannot go on."""
    try:
        yield from rows
    except RowError as error:
        yield CutError(str(error))


def tried(read: Callable[[], Record]) -> Record | RowError:
    """Return the row that ``read`` returns, or its error."""
    try:
        return read()
    except RowError as error:
        return error


def describe_value(value: object) -> str:
    """Return the type of ``value`` in plain words, with the value itself, shortened, for
    use in an error message.
    """
    if value is None:
        return "missing (null)"
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)} values"
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string"}
    shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
    return f"{names.get(type(value), type(value).__name__)} ({shown})"


def record(name: str, number: int, row: object, columns: Columns) -> Record:
    """Take the values of ``columns`` out of row ``number`` of the source ``name``: a list of so
    many, or an object.
    """
    if isinstance(row, list) and len(row) == len(needed := required(columns)):
        return with_nulls(row, needed, columns)
    if isinstance(row, dict):
        if EVERY_COLUMN in columns.values():
            return (row,)
        values = [row.get(column, NOTHING) for column in columns.values()]
        if NOTHING not in values:  # as in most rows
            return tuple(values)
        for setting, column in columns.items():
            if (
                column not in row
                and inside(row, column.split(".")) is NOTHING
                and not is_optional(setting)
            ):
                near = nearest(column, dotted(row))
                lost = (
                    f"no column {column!r}{near}, which the rows before it have; fill it in, or"
                    " remove the row"
                )
                raise row_error(
                    name, number, lost if number > 1 else missing(setting, dotted(row), columns)
                )
        values = [
            row[column] if column in row else inside(row, column.split("."))
            for column in columns.values()
        ]
        return tuple(None if value is NOTHING else value for value in values)
    as_object = "{" + ", ".join(f'"{column}": …' for column in required(columns).values()) + "}"
    expected = f"{as_list(columns)} or {as_object}"
    holds_rows = isinstance(row, list) and row and isinstance(row[0], list | dict)
    hint = "; a file that is one array has the suffix .json" if holds_rows else ""
    raise row_error(name, number, f"expected {expected}, found {describe_value(row)}{hint}")


def inside(value: object, names: Sequence[str]) -> object:
    """Return the value of the column ``names``, each inside the one before; NOTHING if
    it is not there.
    """
    for name in names:
        value = (
            value.get(name, NOTHING)
            if isinstance(value, dict)
            else None
            if value is None
            else NOTHING
        )
    return value


def dotted(row: Mapping[str, object]) -> list[str]:
    """Return the names of a row's columns, those inside another with a dot."""
    values = {key: value if isinstance(value, dict) else {} for key, value in row.items()}
    return [
        name for key, inner in values.items() for name in [f"{key}.{k}" for k in inner] or [key]
    ]


def as_list(columns: Columns) -> str:
    """Show a row in the form of a list: ``[text, label]``."""
    return f"[{', '.join(setting.rpartition('.')[2] for setting in required(columns))}]"


def missing(setting: str, names: Iterable[str], columns: Columns) -> str:
    """Return the problem of a column that is not among ``names``."""
    known, column = list(map(str, names)), columns[setting]
    listed = ", ".join(known) or "none"
    return (
        f"no column {column!r}{nearest(column, known)} (found: {listed}); name it with --set"
        f" {setting}=NAME"
    )


def position(name: str, names: Sequence[str], setting: str, columns: Columns) -> int:
    """Return the index of the column of ``setting``, or of the column that contains it.

    ``names`` are the columns of the source ``name``.
    """
    column = columns[setting]
    for known in (column, column.split(".")[0]):
        if known in names:
            return names.index(known)
    raise DataError(f"{name}: {missing(setting, names, columns)}")

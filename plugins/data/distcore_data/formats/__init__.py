"""Formats of rows, and what a format of another distribution is made of.

Whoever writes one imports the names in ``__all__``: a ``FileFormat`` or a ``FolderFormat`` is named
by an entry point of ``distcore.readers``. Formats of this distribution are in ``file_formats``.
"""

from distcore_data.formats.arrow_columns import UNREADABLE
from distcore_data.formats.arrow_rows import arrow_records, near_rows, take_arrow
from distcore_data.formats.columns import (
    Columns,
    Record,
    RowError,
    known_columns,
    position,
    record,
    row_error,
    tried,
    until_cut,
)
from distcore_data.formats.format import FileFormat, FolderFormat, Rows
from distcore_data.formats.opening import (
    BROKEN,
    FileState,
    broken,
    need_pyarrow,
    open_bytes,
    pass_over,
    reason,
    state_of,
)
from distcore_data.formats.places import START, Place
from distcore_data.formats.row_limit import most_bytes, over_limit
from distcore_data.room import INDEX

__all__ = [
    "BROKEN",
    "INDEX",
    "START",
    "UNREADABLE",
    "Columns",
    "FileFormat",
    "FileState",
    "FolderFormat",
    "Place",
    "Record",
    "RowError",
    "Rows",
    "arrow_records",
    "broken",
    "known_columns",
    "most_bytes",
    "near_rows",
    "need_pyarrow",
    "open_bytes",
    "over_limit",
    "pass_over",
    "position",
    "reason",
    "record",
    "row_error",
    "state_of",
    "take_arrow",
    "tried",
    "until_cut",
]

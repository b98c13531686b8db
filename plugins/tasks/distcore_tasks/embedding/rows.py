"""Rows of texts: an anchor, a text that belongs to it and, with a column of negatives,
one that does not.
"""

from __future__ import annotations

from collections.abc import Iterable

from distcore_data import Record
from distcore_tasks.embedding.options import Columns
from distcore_tasks.shared.schema import Schema, texts_schema
from distcore_tasks.shared.source_rows import Rows, given_rows

Groups = Rows[tuple[str, ...]]


def schema_of(columns: Columns) -> Schema[tuple[str, ...]]:
    """Return what is read of a row."""
    return texts_schema(
        {role: str(getattr(columns, role)) for role in columns.names}, columns.names
    )


def check_groups(name: str, records: Iterable[Record]) -> Groups:
    """Return checked pairs. Raises DataError with a message that starts with ``name``."""
    return given_rows(name, records, schema_of(Columns()))

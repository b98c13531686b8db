"""Preferences: a prompt with a better and a worse answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from distcore_data import Record
from distcore_tasks.preference.options import Columns
from distcore_tasks.shared.schema import Schema, texts_schema
from distcore_tasks.shared.source_rows import Rows, given_rows

NAMES = ("prompt", "chosen", "rejected")
"""Names of the three texts of a row in messages."""
Preferences = Rows[tuple[str, ...]]


def schema_of(columns: Columns) -> Schema[tuple[str, ...]]:
    """Return what is read of a row."""
    return texts_schema(asdict(columns), NAMES)


def check_preferences(name: str, records: Iterable[Record]) -> Preferences:
    """Return checked records. Raises DataError with a message that starts with ``name``."""
    return given_rows(name, records, schema_of(Columns()))

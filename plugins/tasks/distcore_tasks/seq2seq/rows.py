"""Pairs of texts: a source and a target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from distcore_data import Record
from distcore_tasks.seq2seq.options import Columns
from distcore_tasks.shared.schema import Schema, texts_schema
from distcore_tasks.shared.source_rows import Rows, given_rows

NAMES = ("source", "target")
"""Names of the two texts of a pair in messages."""
Pairs = Rows[tuple[str, ...]]


def schema_of(columns: Columns) -> Schema[tuple[str, ...]]:
    """Return what is read of a row."""
    return texts_schema(asdict(columns), NAMES)


def check_pairs(name: str, records: Iterable[Record]) -> Pairs:
    """Return checked (source, target) records. Raises DataError with a message
    that starts with ``name``.
    """
    return given_rows(name, records, schema_of(Columns()))

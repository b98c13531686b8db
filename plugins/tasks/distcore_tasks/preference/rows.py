"""Preferences: a prompt with a better and a worse answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial

from distcore_data import Record
from distcore_tasks.preference.options import Columns
from distcore_tasks.shared.schema import Schema, texts_schema
from distcore_tasks.shared.source_rows import Rows, given_rows

NAMES = ("prompt", "chosen", "rejected")
"""Names of the three texts of a row in messages."""
Preferences = Rows[tuple[str, ...]]


def schema_of(columns: Columns) -> Schema[tuple[str, ...]]:
    """Return how to read a row to learn from, whose two answers must differ."""
    texts = schema_of_texts(columns)
    return replace(texts, problem=partial(_problem, texts.problem))


def schema_of_texts(columns: Columns) -> Schema[tuple[str, ...]]:
    """Return how to read a row that is only judged, whose two answers may be one text."""
    return texts_schema(asdict(columns), NAMES)


def _problem(problem_of_texts: Callable[[Record], str | None], record: Record) -> str | None:
    """Return the problem of a record; ``None`` for one that a model can learn from."""
    if problem := problem_of_texts(record):
        return problem
    _, chosen, rejected = record
    if chosen == rejected:
        return "chosen and rejected are the same text: nothing to prefer; remove the row"
    return None


def check_preferences(name: str, records: Iterable[Record]) -> Preferences:
    """Return checked records. Raises DataError with a message that starts with ``name``."""
    return given_rows(name, records, schema_of(Columns()))

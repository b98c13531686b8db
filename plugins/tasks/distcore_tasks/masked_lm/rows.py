"""Texts of a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from distcore_data import Record
from distcore_tasks.masked_lm.options import Columns
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.source_rows import Rows, given_rows
from distcore_tasks.shared.sources import text_problem

Texts = Rows[str]


def schema_of(columns: Columns) -> Schema[str]:
    """Return what is read of a row: a text, not blank, valid Unicode."""
    asked = {f"columns.{column}": name for column, name in asdict(columns).items()}
    return Schema(asked, _problem, _text)


def check_texts(name: str, texts: Iterable[object]) -> Texts:
    """Return checked texts. Raises DataError with a message that starts with ``name``."""
    return given_rows(name, ((text,) for text in texts), schema_of(Columns()))


def _problem(record: Record) -> str | None:
    return text_problem(record[0])


def _text(record: Record) -> str:
    return str(record[0])

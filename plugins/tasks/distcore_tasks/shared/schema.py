"""Schemas: which columns of a row a task reads, which records it refuses, and what it
makes of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from distcore import ConfigError
from distcore_data import Record
from distcore_tasks.shared.sources import text_problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Schema(Generic[T]):
    """What a task reads of a row."""

    columns: Mapping[str, str]
    """The columns of a record, by config key."""
    problem: Callable[[Record], str | None]
    """Return what is wrong with a record; ``None`` for one that can be used."""
    value: Callable[[Record], T]
    """Make a value of a record that can be used."""

    def __post_init__(self) -> None:
        """Raise ConfigError for one column in two places."""
        check_apart(self.columns)


def check_apart(columns: Mapping[str, str]) -> None:
    """Raise ConfigError if two of the columns, by config key, are one; an id may be any column."""
    first_of = dict[str, str]()
    for setting, column in columns.items():
        if setting.endswith(".id"):
            continue
        other = first_of.setdefault(column, setting)
        if other != setting:
            same = f"{other} and {setting} are both {column!r}"
            raise ConfigError(
                f"{same}: one would be read as the other; name another column for one of them"
            )


def texts_schema(columns: Mapping[str, str], names: Sequence[str]) -> Schema[tuple[str, ...]]:
    """Return the schema of rows of texts, none of them blank. ``names``: those of
    the texts in messages.
    """
    asked = {f"columns.{key}": name for key, name in columns.items()}
    return Schema(asked, partial(_texts_problem, tuple(names)), _as_texts)


def _texts_problem(names: Sequence[str], record: Record) -> str | None:
    return next(filter(None, map(text_problem, record, names)), None)


def _as_texts(record: Record) -> tuple[str, ...]:
    return tuple(map(str, record))

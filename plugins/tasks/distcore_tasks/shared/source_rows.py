"""Rows of a source, stored, streamed or embedded, by a task's schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from distcore import DataError
from distcore_data import Record, Source, numbered_records, row_error, source_name
from distcore_tasks.shared.lazy_rows import ReadValues, Values, read_values
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.streams.values import NumberedValues

T = TypeVar("T")


@dataclass(frozen=True)
class Rows(Generic[T]):
    """Rows in file order."""

    name: str
    """Name of these rows in error messages, such as ``data file chats.jsonl``."""
    values: Values[T]
    """One value per row."""

    def __post_init__(self) -> None:
        """Raise DataError for no rows."""
        if not len(self.values):
            raise DataError(f"{self.name}: holds no rows")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)

    def number(self, place: int) -> int:
        """Return the number in the source, from 0, of the row at a place."""
        if isinstance(self.values, ReadValues | NumberedValues):
            return self.values.number(place)
        return place

    def problem(self, place: int, what: str) -> DataError:
        """Return the error of the row at a place."""
        if isinstance(self.values, ReadValues | NumberedValues):
            return self.values.problem(place, what)
        return row_error(self.name, place + 1, what)


def read_rows(
    source: Source, schema: Schema[T], see: Callable[[T], None] = lambda value: None
) -> Rows[T]:
    """Read a data file or split; ``see`` takes each value.

    Raises DataError with file and row of a bad one.
    """

    def read() -> Iterator[tuple[int, T]]:
        records = numbered_records(source, schema.columns, schema.problem)
        return ((number, schema.value(record)) for number, record in records)

    return Rows(source_name(source), read_values(source, read, see))


def given_rows(name: str, records: Iterable[Record], schema: Schema[T]) -> Rows[T]:
    """Return rows of an embedded dataset. Raises DataError that starts with ``name``."""
    return Rows(name, list(checked(name, records, schema)))


def checked(name: str, records: Iterable[Record], schema: Schema[T], start: int = 1) -> Iterator[T]:
    """Yield the values of records.

    Raises DataError with the number of the row, counted from ``start``.
    """
    for number, record in enumerate(records, start):
        if problem := schema.problem(record):
            raise row_error(name, number, problem)
        yield schema.value(record)

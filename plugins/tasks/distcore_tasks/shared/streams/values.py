"""Values of rows by number: of all rows of a source, or of those that a bit for each chooses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from distcore import DataError
from distcore_data import ChosenRows, Filtered, IndexedRows, Source, choose_rows, source_name
from distcore_tasks.shared.arrays import map_array
from distcore_tasks.shared.schema import Schema

T = TypeVar("T")
AT_ONCE = 1024
"""Rows that an iteration reads at a time."""
SAMPLE = 10_000
"""Most rows that stand for all of a source, for training the vocabulary of a built-in model and for
counting tokens.
"""
CHOSEN = "chosen.npy"
"""File of a dataset with the bits of its rows."""


def spread(first: int, end: int) -> np.ndarray:
    """Return at most ``SAMPLE`` numbers from ``first`` to ``end``, which is not one of them, evenly
    spread, int64, ascending.
    """
    count = min(end - first, SAMPLE)
    numbers = np.linspace(first, end - 1, count).astype(np.int64)
    return np.unique(numbers)


@dataclass(frozen=True, eq=False, slots=True)
class NumberedValues(Generic[T]):
    """Values that are read by number; implements ``distcore_tasks.shared.lazy_rows.Values``."""

    name: str
    """Name of the source in error messages, such as ``data file chats.jsonl``."""
    rows: IndexedRows
    """All rows of the source."""
    schema: Schema[T]
    """Makes values of records."""
    chosen: ChosenRows | None = None
    """The rows that have a value here; ``None``: all."""

    def __len__(self) -> int:
        """Return the number of values."""
        if self.chosen is None:
            return len(self.rows)
        return len(self.chosen)

    def __iter__(self) -> Iterator[T]:
        """Yield the values in order."""
        for start in range(0, len(self), AT_ONCE):
            end = min(start + AT_ONCE, len(self))
            yield from self.at(range(start, end))

    def each(self, places: np.ndarray) -> Iterator[T]:
        """Yield the values at ``places``, int64, with at most ``AT_ONCE`` in memory."""
        for start in range(0, len(places), AT_ONCE):
            yield from self.at(places[start : start + AT_ONCE])

    def at(self, places: Sequence[int] | np.ndarray) -> list[T]:
        """Return the values at ``places``. Raises DataError with the row."""
        numbers = self.numbers(np.asarray(places, np.int64))
        records = self.rows[numbers]
        for place, record in zip(places, records, strict=True):
            problem = self.schema.problem(record)
            if problem:
                raise self.problem(int(place), problem)
        return [self.schema.value(record) for record in records]

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers in the source of the values at ``places``, both int64."""
        return places if self.chosen is None else self.chosen[places]

    def number(self, place: int) -> int:
        """Return the number in the source of the value at a place."""
        return int(self.numbers(np.array([place]))[0])

    def problem(self, place: int, what: str) -> DataError:
        """Return the error of a value."""
        return self.rows.problem(self.number(place), what)

    def only(self, places: Iterable[np.ndarray]) -> NumberedValues[T]:
        """Return the values at ``places``, in blocks of int64, all of them ascending."""
        blocks = map(self.numbers, places)
        chosen = ChosenRows.from_blocks(len(self.rows), blocks)
        return replace(self, chosen=chosen)

    def sample(self) -> list[T]:
        """Return some values, evenly spread over all."""
        return self.at(spread(0, len(self)))

    def pieces(self, most: int) -> np.ndarray:
        """Return the bounds of the pieces that ``IndexedRows.pieces`` cuts, int64: the first value
        of each, and the end of the last.
        """
        bounds = self.rows.pieces(most)
        if self.chosen is None:
            return bounds
        values_before = [self.chosen.before(int(number)) for number in bounds]
        # Without the pieces in which no row is chosen.
        return np.unique(values_before)

    def fetch(self, places: np.ndarray) -> None:
        """Have the files fetched whose values will be asked for, at ``places``, int64."""
        self.rows.fetch(self.numbers(places))

    def bounds(self, sources: Iterable[Path]) -> list[int]:
        """Return the first value of each source of a mixture, and the end of the last."""
        counts = [0]
        for source in sources:
            # A cut file was refused, or its rest passed over, when the values were opened.
            rows = IndexedRows(source, {}, whole=False)
            counts.append(len(rows))
        ends: list[int] = np.cumsum(counts).tolist()
        if self.chosen is None:
            return ends
        return [self.chosen.before(end) for end in ends]


def choose_values(source: Source, schema: Schema[T], most_bad_rows: int) -> NumberedValues[T]:
    """Return the values of a source by number. A filter, or bad rows that are passed over, take a
    pass over all rows.

    Raises DataError.
    """
    chosen: ChosenRows | None = None
    if most_bad_rows or isinstance(source, Filtered):
        chosen = choose_rows(source, schema.columns, schema.problem)
    return numbered_values(source, schema, chosen)


def open_values(source: Source, schema: Schema[T], folder: Path) -> NumberedValues[T]:
    """Return values that ``save_values`` saved to ``folder``."""
    file = folder / CHOSEN
    chosen = ChosenRows(map_array(file)) if file.is_file() else None
    return numbered_values(source, schema, chosen)


def save_values(values: NumberedValues[T], folder: Path) -> None:
    """Write which rows have values to the new folder of a dataset."""
    folder.mkdir()
    if values.chosen is not None:
        np.save(folder / CHOSEN, values.chosen.bits)


def numbered_values(
    source: Source, schema: Schema[T], chosen: ChosenRows | None
) -> NumberedValues[T]:
    """Return the values of the ``chosen`` rows of a source; ``None``: of all.

    A file that is cut raises DataError, unless rows were chosen from those before the cut.
    """
    unfiltered = source.source if isinstance(source, Filtered) else source
    rows = IndexedRows(unfiltered, schema.columns, whole=chosen is None)
    return NumberedValues(source_name(source), rows, schema, chosen)

"""Values of rows by number. Which rows are meant is a bit for each, or nothing if all are."""

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
from distcore_tasks.shared.splits import evaluation_rows, without

T = TypeVar("T")
AT_ONCE = 1024
"""Rows that an iteration reads at a time."""
SAMPLE = 10_000
"""Most rows on which the vocabulary of a built-in model is trained, and tokens are counted."""
CHOSEN = "chosen.npy"
"""File of a dataset with the bits of its rows."""


def spread(first: int, end: int) -> np.ndarray:
    """Return some numbers, evenly spread from ``first`` to ``end``, int64, ascending."""
    return np.unique(np.linspace(first, end - 1, min(end - first, SAMPLE)).astype(np.int64))


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
        return len(self.rows if self.chosen is None else self.chosen)

    def __iter__(self) -> Iterator[T]:
        """Yield the values in order."""
        for start in range(0, len(self), AT_ONCE):
            yield from self.at(range(start, min(start + AT_ONCE, len(self))))

    def each(self, places: np.ndarray) -> Iterator[T]:
        """Yield the values at ``places``, int64, some of them in memory at a time."""
        for start in range(0, len(places), AT_ONCE):
            yield from self.at(places[start : start + AT_ONCE])

    def at(self, places: Sequence[int] | np.ndarray) -> list[T]:
        """Return the values at ``places``. Raises DataError with the row."""
        records = self.rows[self.numbers(np.asarray(places, np.int64))]
        for place, record in zip(places, records, strict=True):
            if what := self.schema.problem(record):
                raise self.problem(int(place), what)
        return list(map(self.schema.value, records))

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
        """Return the values at ``places``, int64, ascending, some of which are given at a time."""
        return replace(
            self, chosen=ChosenRows.from_blocks(len(self.rows), map(self.numbers, places))
        )

    def sample(self) -> list[T]:
        """Return some values, evenly spread over all."""
        return self.at(spread(0, len(self)))

    def pieces(self, most: int) -> np.ndarray:
        """Return the first value of each piece of a file, as ``IndexedRows.pieces`` does,
        and the end, int64.
        """
        bounds = self.rows.pieces(most)
        return (
            bounds
            if self.chosen is None
            else np.unique([self.chosen.before(int(number)) for number in bounds])
        )

    def fetch(self, places: np.ndarray) -> None:
        """Have the files of values fetched that will be asked for, int64."""
        self.rows.fetch(self.numbers(places))

    def bounds(self, sources: Iterable[Path]) -> list[int]:
        """Return the first value of each source of a mixture, and the end of the last."""
        ends = np.cumsum(
            [0, *(len(IndexedRows(source, {}, whole=False)) for source in sources)]
        ).tolist()
        return ends if self.chosen is None else list(map(self.chosen.before, ends))


def choose_values(source: Source, schema: Schema[T], most_bad_rows: int) -> NumberedValues[T]:
    """Return the values of a source by number. A filter, or bad rows that are passed over, take a
    pass over all rows.

    Raises DataError.
    """
    is_all = not most_bad_rows and not isinstance(source, Filtered)
    return numbered_values(
        source, schema, None if is_all else choose_rows(source, schema.columns, schema.problem)
    )


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
    """Return the values of the ``chosen`` rows of a source, or of all; of these no
    file may be cut.
    """
    rows = IndexedRows(
        source.source if isinstance(source, Filtered) else source,
        schema.columns,
        whole=chosen is None,
    )
    return NumberedValues(source_name(source), rows, schema, chosen)


def split_values(
    values: NumberedValues[T], fraction: float, seed: int
) -> tuple[NumberedValues[T], np.ndarray]:
    """Return the values for training, and the places of the evaluation rows, int64, ascending.

    They are those of ``evaluation_rows``.
    """
    evaluation = evaluation_rows(values.name, len(values), fraction, seed)
    return values.only(without(len(values), evaluation)), evaluation

"""Values of a source: by number, and in order, in one pass for several datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from distcore import DataError
from distcore_data import ChosenRows, Source, data_format, numbered_records, skipping
from distcore_tasks.rows.encoding import schema_of
from distcore_tasks.rows.pipeline import RowPipeline
from distcore_tasks.shared.arrays import map_array
from distcore_tasks.shared.mixtures import mixed_sources, source_bounds
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.source_rows import Rows as SourceRows
from distcore_tasks.shared.source_rows import read_rows
from distcore_tasks.shared.sources import source_file
from distcore_tasks.shared.streams.values import (
    NumberedValues,
    choose_values,
    numbered_values,
    spread,
)

V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class ListedValues(Generic[V]):
    """Values in memory: of an embedded dataset, or of a ``.json`` list, which is parsed whole."""

    rows: SourceRows[V]
    """All rows of the source."""
    values: Sequence[V]
    """Their values."""
    chosen: np.ndarray
    """Numbers of the rows that have a value here, int64, ascending."""

    @property
    def name(self) -> str:
        """Name of the source in error messages."""
        return self.rows.name

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.chosen)

    def __iter__(self) -> Iterator[V]:
        """Yield the values in order."""
        return iter(self.at(np.arange(len(self))))

    def at(self, places: Sequence[int] | np.ndarray) -> list[V]:
        """Return the values at ``places``."""
        numbers = self.chosen[np.asarray(places, np.int64)]
        return [self.values[number] for number in numbers.tolist()]

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers in the source of the values at ``places``, both int64."""
        numbers = map(self.rows.number, self.chosen[places].tolist())
        return np.fromiter(numbers, np.int64, len(places))

    def sample(self) -> list[V]:
        """Return some values, evenly spread over all."""
        return self.at(spread(0, len(self)))

    def only(self, places: Iterable[np.ndarray]) -> ListedValues[V]:
        """Return the values at ``places``, in blocks of int64, all of them ascending."""
        return replace(self, chosen=self.chosen[np.concatenate([*places])])

    def problem(self, place: int, what: str) -> DataError:
        """Return the error of a value."""
        return self.rows.problem(int(self.chosen[place]), what)


Values = NumberedValues[V] | ListedValues[V]


@dataclass(frozen=True, eq=False)
class SizedPass(Generic[V]):
    """Values that each iteration reads in order."""

    values: Values[V]
    """The values."""
    source: Source | None
    """Where they are read from; ``None`` for an embedded dataset."""

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.values)

    def __iter__(self) -> Iterator[V]:
        """Yield the values in order."""
        return (value for _, value in in_one_pass({"": self.values}, self.source))


def open_source(source: str, pipeline: RowPipeline[V]) -> Values[V]:
    """Return the values of an embedded dataset, a file or a split. Raises DataError."""
    options = pipeline.options
    if source in pipeline.embedded:
        return _listed(pipeline.embedded[source]())
    opened = source_file(source, pipeline.embedded, options.filter)
    pipeline.check_source(opened)
    if not options.stream and data_format(opened) == ".json":
        return _listed(read_rows(opened, schema_of(pipeline)))
    values = choose_values(opened, schema_of(pipeline), options.skip_bad_rows)
    if not len(values):
        raise DataError(f"{values.name}: holds no rows")
    return values


def _listed(rows: SourceRows[V]) -> ListedValues[V]:
    return ListedValues(rows, [*rows.values], np.arange(len(rows)))


def in_one_pass(parts: Mapping[str, Values[V]], source: Source | None) -> Iterator[tuple[str, V]]:
    """Yield the values of datasets that are made of one ``source``, each with its dataset's name.

    All of them are read in one pass, in the order of the source.
    """
    is_in: dict[str, Callable[[int], bool]] = {}
    schema: Schema[V] | None = None
    for name, values in parts.items():
        if isinstance(values, ListedValues):
            yield from ((name, value) for value in values)
        else:
            is_in[name] = _membership(values)
            schema = values.schema
    if schema is None:
        return
    assert source is not None
    for number, record in numbered_records(source, schema.columns, schema.problem):
        for name, has_row in is_in.items():
            if has_row(number):
                yield name, schema.value(record)


def _membership(values: NumberedValues[Any]) -> Callable[[int], bool]:
    """Return the function that tells whether a row of the source has a value."""
    if values.chosen is None:
        return lambda number: True
    # Bytes are faster than an array where one of them is asked for.
    bits = values.chosen.bits.tobytes()
    return lambda number: bits[number >> 3] >> (7 - (number & 7)) & 1 == 1


def chosen_file(entry: Path, dataset: str) -> Path:
    """Return the file of a cache entry with a bit for each row of a dataset's source.

    It is not in the folder of the dataset, where files have the names of columns.
    """
    return entry / f"{dataset}.chosen.npy"


def save_chosen(values: Values[Any], file: Path) -> None:
    """Write which rows of a source have values; no file says that all have one."""
    if isinstance(values, ListedValues):
        chosen: ChosenRows | None = ChosenRows.from_numbers(len(values.rows), values.chosen)
    else:
        chosen = values.chosen
    if chosen is not None:
        np.save(file, chosen.bits)


def open_chosen(source: str, pipeline: RowPipeline[V], file: Path) -> Values[V]:
    """Return the values of which ``save_chosen`` wrote the ``file``."""
    options = pipeline.options
    opened = read_from(source, pipeline)
    chosen = ChosenRows(map_array(file)) if file.is_file() else None
    if opened is not None and (options.stream or data_format(opened) != ".json"):
        return numbered_values(opened, schema_of(pipeline), chosen)
    with skipping(options.skip_bad_rows):
        values = open_source(source, pipeline)
    return values if chosen is None else values.only(chosen.blocks())


def bounds_in_values(
    train: Values[Any], pipeline: RowPipeline[Any], read: Callable[[str], Values[Any]]
) -> list[int]:
    """Return the first training value of each source of a mixture, and the end of the last.

    Empty without a mixture. ``read`` opens a source.
    """
    sources = mixed_sources(pipeline.options)
    if not sources:
        return []
    if isinstance(train, NumberedValues):
        return train.bounds([Path(source).expanduser() for source in sources])
    return source_bounds(pipeline.options, read, train.chosen)


def read_from(source: str, pipeline: RowPipeline[Any]) -> Source | None:
    """Return the file or split of a source; ``None`` for an embedded dataset."""
    if source in pipeline.embedded:
        return None
    return source_file(source, pipeline.embedded, pipeline.options.filter)

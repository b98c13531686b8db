"""Which rows of a source can be read and are kept, told in one pass that stores a bit for each."""

from __future__ import annotations

from collections.abc import Callable

from distcore_data.files import Source, numbered_records
from distcore_data.filters import Filtered
from distcore_data.formats.columns import Columns, Record
from distcore_data.indexes.chosen import ChosenRows
from distcore_data.indexes.rows import IndexedRows


def choose_rows(
    source: Source, columns: Columns, problem: Callable[[Record], str | None] = lambda record: None
) -> ChosenRows:
    """Return the rows of a source that ``numbered_records`` yields, by
    their numbers in ``IndexedRows``.

    Reads all of them once; inside ``skipping`` bad rows are passed over. Raises DataError.
    """
    rows = len(
        IndexedRows(source.source if isinstance(source, Filtered) else source, columns, whole=False)
    )
    return ChosenRows.from_numbers(
        rows, (number for number, _ in numbered_records(source, columns, problem))
    )

"""Which rows of a source can be read and are kept, told in one pass that stores a bit for each."""

from __future__ import annotations

from collections.abc import Iterator

from distcore_data.files import FILTER, Source, source_name
from distcore_data.filters import Filtered
from distcore_data.formats.columns import Columns
from distcore_data.indexes.chosen import ChosenRows
from distcore_data.indexes.rows import IndexedRows


def choose_rows(source: Source, columns: Columns) -> ChosenRows:
    """Return the rows of a source that ``read_records`` yields, by their numbers in ``IndexedRows``.

    Reads all of them once; inside ``skipping`` bad rows are passed over. Raises DataError.
    """
    if not isinstance(source, Filtered):
        rows = IndexedRows(source, columns, whole=False)
        return ChosenRows.of(len(rows), (number for number, _ in rows.readable()))
    filtered, rows = source, IndexedRows(source.source, {**columns, FILTER: source.column}, whole=False)

    def kept() -> Iterator[int]:
        return (number for number, (*_, value) in rows.readable() if filtered.keeps(value))

    chosen = ChosenRows.of(len(rows), kept())
    if not len(chosen):
        raise filtered.keeps_none(source_name(filtered.source))
    return chosen

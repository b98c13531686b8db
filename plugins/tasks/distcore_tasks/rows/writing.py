"""Encode the values of a dataset in chunks, and write their rows."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import pass_over
from distcore_tasks.rows.blocks import write_blocks
from distcore_tasks.rows.encoding import naming_row
from distcore_tasks.rows.labels import LABELS
from distcore_tasks.rows.origins import SOURCE_ID, SOURCE_ROW
from distcore_tasks.rows.pipeline import Encoded, Refuse, RowPipeline
from distcore_tasks.rows.sources import Values
from distcore_tasks.rows.table import CachedTable, TableColumn, open_table, text_column
from distcore_tasks.rows.table_files import TableWriter
from distcore_tasks.shared.jagged import write_content
from distcore_tasks.shared.splits import without
from distcore_tasks.shared.stored_arrays import Entries
from distcore_tasks.shared.tokenize_rows import CHARACTERS, CHUNK

Encode = Callable[[Sequence[Any], Refuse], Encoded]
"""``RowPipeline.encode`` with a tokenizer."""


class DatasetWriter:
    """A dataset that is encoded and written while its values are read.

    A context manager, which closes its files.
    """

    table: CachedTable
    """The rows, once all are written."""
    row_bounds: list[int]
    """First row of each source of a mixture, and the end of the last one, once all are written."""

    def __init__(
        self,
        folder: Path,
        pipeline: RowPipeline[Any],
        values: Values[Any],
        encode: Encode,
        bounds: Sequence[int] = (),
        targets: Entries | None = None,
    ) -> None:
        """Write to the new ``folder``.

        ``values``: those that will be added. ``bounds``: first value of each source of a mixture.
        ``targets``: the encoded label of each value.
        """
        self.values = values
        self.accepted = 0
        self.counts = Counter[str]()
        self._folder = folder
        self._writer = TableWriter(folder)
        self._pipeline, self._encode, self._bounds = pipeline, encode, bounds
        self._targets = targets
        self._chunk = list[Any]()
        # Characters, or words, of the chunk.
        self._size = 0
        # Place of the chunk's first value.
        self._begin = 0
        self._rows_of_values = array("q", [0])
        self._refused = list[int]()
        self._first_refusal: DataError | None = None

    def __enter__(self) -> DatasetWriter:
        """Return the writer."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the files."""
        self._writer.__exit__(*error)

    def add(self, value: Any) -> None:
        """Append the rows of the next value. Raises DataError for one that is refused."""
        self._chunk.append(value)
        self._size += self._pipeline.size(value)
        if len(self._chunk) == CHUNK or self._size >= CHARACTERS:
            self._write_chunk()

    def finish(self) -> None:
        """Write what is left, and map the table. Raises DataError if all values were refused."""
        if self._chunk:
            self._write_chunk()
        if self._first_refusal and not self.accepted:
            raise self._first_refusal
        self.table = self._writer.finish()
        rows_before: np.ndarray = np.cumsum(self._rows_of_values)
        self.row_bounds = [int(rows_before[bound]) for bound in self._bounds]
        if self._pipeline.block is not None:
            numbers, block = self._pipeline.block_numbers, self._pipeline.block
            self.row_bounds = write_blocks(self._folder, block, self.row_bounds, numbers)
            self.table = open_table(self._folder)
        write_content(self._folder, self._pipeline.content(self.table))

    @property
    def accepted_values(self) -> Values[Any]:
        """The values that were not refused."""
        if not self._refused:
            return self.values
        refused = np.array(self._refused, np.int64)
        return self.values.only(without(len(self.values), refused))

    def _write_chunk(self) -> None:
        """Encode and write the values of the chunk that are not refused."""
        values, places = self._chunk, range(len(self._chunk))
        refused = set[int]()

        def refuse(place: int, what: str) -> None:
            error = self.values.problem(self._begin + place, what)
            pass_over(error)
            self._first_refusal = self._first_refusal or error
            refused.add(place)

        encoded: Encoded | None
        with naming_row(lambda place, what: self.values.problem(self._begin + place, what)):
            encoded = self._encode(values, refuse)
        if refused:
            # Again, without them: they count for nothing.
            left = [place for place in places if place not in refused]
            values = [values[place] for place in left]
            with naming_row(
                lambda place, what: self.values.problem(self._begin + left[place], what)
            ):
                encoded = self._encode(values, refuse) if values else None
        if encoded:
            accepted = np.array([place for place in places if place not in refused], np.int64)
            self._writer.add(self._whole_rows(encoded, values, self._begin + accepted))
            self.counts.update(encoded.counts)
        if self._bounds:
            self._count_rows(encoded, [place not in refused for place in places])
        self._refused += [self._begin + place for place in sorted(refused)]
        self.accepted += len(values)
        self._begin += len(places)
        self._chunk, self._size = [], 0

    def _whole_rows(
        self, encoded: Encoded, values: Sequence[Any], places: np.ndarray
    ) -> CachedTable:
        """Return the rows of ``values`` with their labels and origins.

        ``places``: those of the values.
        """
        columns: dict[str, TableColumn] = {**encoded.table.columns}
        owners = np.arange(len(values)) if encoded.owners is None else encoded.owners
        if self._targets is not None:
            columns[LABELS] = self._targets[places][owners]
        if not self._pipeline.tells_origins:
            return CachedTable(columns)
        columns[SOURCE_ROW] = self.values.numbers(places)[owners]
        ids = [self._pipeline.row_id(value) for value in values]
        if ids[0] is not None:
            texts = [json.dumps(ids[owner], ensure_ascii=False) for owner in owners.tolist()]
            columns[SOURCE_ID] = text_column(texts)
        return CachedTable(columns)

    def _count_rows(self, encoded: Encoded | None, is_accepted: Sequence[bool]) -> None:
        """Take down the number of rows of each value of the chunk."""
        rows = np.zeros(len(is_accepted), np.int64)
        if encoded and encoded.owners is None:
            rows[is_accepted] = 1
        elif encoded and encoded.owners is not None:
            rows[is_accepted] = np.bincount(encoded.owners, minlength=sum(is_accepted))
        self._rows_of_values.extend(rows.tolist())


def table_of(encode: Encode, values: Sequence[Any], refuse: Refuse) -> CachedTable:
    """Return the rows of some values, one for each."""
    return encode(values, refuse).table

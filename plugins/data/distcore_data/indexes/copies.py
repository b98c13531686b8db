"""Files whose rows can only be reached by reading those before them, copied once to the cache, from
where they are read by number: compressed files, lists of JSON, large row groups of Parquet.

A copy has the columns that are asked for. Copies take ``room`` as those of remote files do: the
ones that were not read for the longest time make room, and are made again when they are needed.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import room
from distcore_data.formats.arrow_columns import DECODED_ROWS
from distcore_data.formats.arrow_rows import take_arrow
from distcore_data.formats.columns import Columns, Record, RowError
from distcore_data.formats.installed import file_format
from distcore_data.formats.opening import COMPRESSED, extension
from distcore_data.formats.parquet_rows import column_bytes, parquet_batches
from distcore_data.formats.reading import read_rows
from distcore_data.formats.row_limit import most_bytes
from distcore_data.indexes.drafts import Draft, make_copy
from distcore_data.indexes.entries import FileIndex
from distcore_data.indexes.record_file import take_records, write_records

FORMAT = 1
"""Version of a copy of records, part of its key. Raise it when what is in one changes."""
ARROW_FORMAT = 2
"""Version of a copy of Parquet columns, part of its key."""
LARGE = 2**14
"""Rows of a group from which on a Parquet file is copied."""


def copies_folder() -> Path:
    """Return the folder of these copies."""
    return room.copies_folder() / "pieces"


def is_large(index: FileIndex) -> bool:
    """Return True for a Parquet file with a group of many rows."""
    starts = [*index.places[:, 0].tolist(), index.rows]
    return bool(np.diff(starts).max(initial=0) > LARGE)


def copied_rows(file: Path, index: FileIndex, columns: Columns) -> CopiedRows | None:
    """Return the rows of a file that is copied; ``None`` for one that is read where it is, and for
    no columns.
    """
    if not columns:
        return None
    kind = index.kind or extension(file)
    form = file_format(kind)
    if file.suffix.lower() in COMPRESSED or (form and form.is_copied):
        return CopiedRecords(file, index, columns)
    if kind == ".parquet" and is_large(index):
        return CopiedColumns(file, index, columns)
    return None


class CopiedRows(ABC):
    """The rows of a file, in its copy."""

    remedy: str
    """What to do if the copy is larger than the cache."""

    def __init__(self, file: Path, index: FileIndex, columns: Columns) -> None:
        """Find the copy of ``columns`` of a file, which need not be there."""
        self.file, self._index, self._columns = file, index, columns
        self.copy = copies_folder() / self._name()
        self.is_possible = True

    def make(self) -> None:
        """Make the copy unless it is there; the file is. Raises DataError.

        ``is_possible`` is False from then on if the file is damaged, so that a reader says which
        of its rows are.
        """
        make_copy(self.copy, self.file, self.remedy, self._write)

    def is_there(self) -> bool:
        """Return True if the copy was made, and did not make room for others."""
        return self.copy.is_file()

    def expected_bytes(self) -> int:
        """Return the bytes of the copy, or as many as it may have, as far as that is known."""
        return self.copy.stat().st_size if self.is_there() else self._most_bytes

    @abstractmethod
    def take(self, numbers: np.ndarray) -> list[Record | None]:
        """Return the rows of these numbers, int64, ascending; ``None`` for those that are read from
        the file. Raises FileNotFoundError if the copy is not there.
        """

    @abstractmethod
    def _name(self) -> str:
        """Return the file name of the copy, which tells content and columns."""

    @cached_property
    @abstractmethod
    def _most_bytes(self) -> int:
        """About as many bytes as a copy of all columns has."""

    @abstractmethod
    def _write(self, draft: Draft) -> None:
        """Write the copy."""


class CopiedRecords(CopiedRows):
    """Rows of a text file or a tar file that is compressed, or of a list of JSON."""

    remedy = "write its rows to several files"

    def take(self, numbers: np.ndarray) -> list[Record | None]:
        """Return the rows of these numbers."""
        return take_records(self.copy, numbers)

    def _name(self) -> str:
        columns = tuple(self._columns.items())
        key = FORMAT, self._index.digest, self._index.kind, most_bytes(), columns
        return f"{_digest(key)}.rows"

    @cached_property
    def _most_bytes(self) -> int:
        return self._index.unpacked or self._index.size

    def _write(self, draft: Draft) -> None:
        count = write_records(draft, self._index.rows, read_rows(self.file, self._columns))
        if count != self._index.rows:
            raise DataError(f"data file {self.file}: changed while it was read")


class CopiedColumns(CopiedRows):
    """Rows of a Parquet file, of which some are a batch of Arrow."""

    remedy = f"write row groups of at most {LARGE} rows, which are not copied"

    def make(self) -> None:
        """Make the copy unless it is there."""
        try:
            super().make()
        except RowError:  # a reader says so, of the rows of this group alone
            self.is_possible = False

    def take(self, numbers: np.ndarray) -> list[Record | None]:
        """Return the rows of these numbers."""
        written = self.copy.stat().st_mtime_ns  # which tells the version of a mapped file
        os.utime(self.copy, ns=(time.time_ns(), written))
        batches, places = np.divmod(numbers, DECODED_ROWS)
        taken = take_arrow(self.copy, self._columns, batches, places)
        return [None] * len(numbers) if taken is None else [*taken]

    def _name(self) -> str:
        names = sorted(set(self._columns.values()))
        return f"{_digest((ARROW_FORMAT, self._index.digest, names))}.arrow"

    @cached_property
    def _most_bytes(self) -> int:
        """Bytes of the columns, encoded as in the file."""
        if not self.file.is_file():  # a remote file, which was not fetched yet
            return self._index.size
        return column_bytes(self.file, self._columns)

    def _write(self, draft: Draft) -> None:
        """Write batches of ``DECODED_ROWS`` rows, of which one is in memory."""
        import pyarrow as pa

        writer: Any = None
        left: list[Any] = []
        for batch in parquet_batches(self.file, self._columns):
            writer = writer or pa.ipc.new_file(draft, batch.schema)
            table = pa.Table.from_batches([*left, batch])
            whole = len(table) // DECODED_ROWS * DECODED_ROWS
            for start in range(0, whole, DECODED_ROWS):
                writer.write_table(table.slice(start, DECODED_ROWS).combine_chunks())
            left = table.slice(whole).to_batches()
        if left:
            writer.write_table(pa.Table.from_batches(left).combine_chunks())
        if writer:
            writer.close()


def _digest(key: object) -> str:
    return sha256(repr(key).encode()).hexdigest()[:40]

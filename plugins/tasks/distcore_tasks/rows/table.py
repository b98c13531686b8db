"""Rows as a table of named columns, in memory or mapped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distcore_tasks.shared.arrays import map_array
from distcore_tasks.shared.jagged import Flat, Jagged, Spans, flat_of, open_flat

LAYOUT = "layout.json"
"""File with the names of a table's columns, in order, and which of them are jagged."""
BLOCKS = "blocks"
"""Folder of a table with the places of its blocks, and their numbers."""
TableColumn = Jagged | np.ndarray
"""A column: some entries of each row, which is jagged, or as many of each row, ``(rows, …)``."""

OneRow = dict[str, np.ndarray]
"""The entries of a row by column; a column that is not jagged has one, ``(1, …)``."""


class Table(Protocol):
    """Encoded rows by number."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def take(self, numbers: np.ndarray) -> Rows:
        """Return the rows ``numbers``, int64 ``(n,)``, in this order."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class CachedTable:
    """Rows in arrays; implements ``Table``."""

    columns: Mapping[str, TableColumn]
    """The columns by name."""
    folder: Path | None = None
    """The folder whose files are mapped; ``None`` for arrays in memory."""

    def __len__(self) -> int:
        """Return the number of rows."""
        for column in self.columns.values():
            return len(column)
        return 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process map the same files: their pages are in memory once."""
        if self.folder is None:
            return CachedTable, (self.columns,)
        return open_table, (self.folder,)

    def take(self, numbers: np.ndarray) -> Rows:
        """Return some rows; their entries are read when a column is asked for."""
        return Rows(self, numbers)

    def all(self) -> Rows:
        """Return all rows, in order."""
        return Rows(self, None)

    def jagged(self, name: str) -> Jagged:
        """Return a jagged column."""
        column = self.columns[name]
        assert isinstance(column, Jagged)
        return column

    def flat(self, name: str) -> Flat:
        """Return a jagged column whose rows share no entries."""
        column = self.columns[name]
        assert isinstance(column, Flat)
        return column

    def check_lengths(self, rows: int) -> str | None:
        """Return the name of a column with another number of rows; ``None`` without one."""
        return next((name for name, one in self.columns.items() if len(one) != rows), None)


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """Some rows of a table, column by column."""

    table: CachedTable
    """The table."""
    numbers: np.ndarray | None
    """Their numbers there, int64 ``(n,)``; ``None``: all rows."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.table) if self.numbers is None else len(self.numbers)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the entry of each row in a column that is not jagged, ``(n, …)``."""
        column = self.table.columns[name]
        assert isinstance(column, np.ndarray)
        return column if self.numbers is None else column[self.numbers]

    def spans(self, name: str) -> Spans:
        """Return the rows of a jagged column; reads no entries."""
        column = self.table.jagged(name)
        starts, ends = column.starts, column.ends
        if self.numbers is not None:
            starts, ends = starts[self.numbers], ends[self.numbers]
        return Spans(column.values, starts, ends)

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.table.columns)

    def is_jagged(self, name: str) -> bool:
        """Return True for a column with some entries of each row."""
        return not isinstance(self.table.columns[name], np.ndarray)

    def lengths(self, name: str) -> np.ndarray:
        """Return the entries of each row in a jagged column, int64 ``(n,)``; reads none of them."""
        return self.spans(name).lengths

    def each(self, name: str) -> list[np.ndarray]:
        """Return the entries of each row in a jagged column."""
        spans = self.spans(name)
        places = zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)
        return [spans.values[start:end] for start, end in places]

    def padded(self, name: str, fill: int, *, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return a jagged column as a table ``(n, longest)``, and its mask, as ``Flat.padded``."""
        return self.table.jagged(name).padded(self._numbers(), fill, left=left)

    def _numbers(self) -> np.ndarray:
        return np.arange(len(self.table)) if self.numbers is None else self.numbers


def open_table(folder: Path) -> CachedTable:
    """Map the files of ``table_files.TableWriter`` into memory.

    If blocks were cut from the rows, these are the rows of the table.
    """
    table = CachedTable(_map_columns(folder), folder)
    if not (folder / BLOCKS).is_dir():
        return table
    return cut_table(table, CachedTable(_map_columns(folder / BLOCKS)))


def cut_table(table: CachedTable, blocks: CachedTable) -> CachedTable:
    """Return the blocks of the joined rows of a table.

    Block i has the entries from ``starts[i]`` to ``ends[i]`` of each jagged column. It has the
    other numbers of ``blocks``, and none of the ``table``.
    """
    places = blocks.all()
    columns: dict[str, TableColumn] = {}
    for name, column in table.columns.items():
        if isinstance(column, Jagged):
            columns[name] = Spans(column.values, places["starts"], places["ends"])
    for name in blocks.columns.keys() - {"starts", "ends"}:
        columns[name] = places[name]
    return CachedTable(columns, table.folder)


def _map_columns(folder: Path) -> dict[str, TableColumn]:
    layout: dict[str, bool] = json.loads((folder / LAYOUT).read_text(encoding="utf-8"))
    columns: dict[str, TableColumn] = {}
    for name, is_jagged in layout.items():
        columns[name] = open_flat(folder, name) if is_jagged else map_array(folder / f"{name}.npy")
    return columns


def text_column(texts: Sequence[str]) -> Flat:
    """Return a jagged column of the bytes of texts, in UTF-8."""
    parts = [text.encode() for text in texts]
    return flat_of(np.frombuffer(b"".join(parts), np.uint8), np.array([*map(len, parts)]))


def row_of(table: CachedTable, number: int) -> OneRow:
    """Return one row of a table."""
    return {
        name: column.row(number) if isinstance(column, Jagged) else column[number : number + 1]
        for name, column in table.columns.items()
    }


def joined_table(rows: Sequence[OneRow], like: CachedTable) -> CachedTable:
    """Return a table of these rows, with the columns of another one."""
    columns: dict[str, TableColumn] = {}
    for name, column in like.columns.items():
        entries = [row[name] for row in rows]
        if isinstance(column, Jagged):
            columns[name] = joined_rows(entries, column)
        else:
            columns[name] = np.concatenate([column[:0], *entries])
    return CachedTable(columns)


def joined_rows(rows: Sequence[np.ndarray], like: Jagged) -> Flat:
    """Return a jagged column of these rows, with the type of entries of another one."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return flat_of(np.concatenate([like.values[:0], *rows]), lengths)

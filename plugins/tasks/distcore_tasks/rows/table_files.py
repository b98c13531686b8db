"""Tables on disk: one or two files for each column, written in chunks of rows."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from distcore_tasks.rows.table import LAYOUT, CachedTable, TableColumn, open_table
from distcore_tasks.shared.arrays import ArrayFile
from distcore_tasks.shared.jagged import Flat, FlatFile


class TableWriter:
    """A new table in a folder; a context manager, which closes its files."""

    def __init__(self, folder: Path) -> None:
        """Create the ``folder``."""
        folder.mkdir()
        self._folder = folder
        self._jagged = dict[str, FlatFile]()
        self._numbers = dict[str, ArrayFile]()
        self._layout = dict[str, bool]()
        self._open_files = ExitStack()

    def __enter__(self) -> TableWriter:
        """Return the writer."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the files."""
        self._open_files.close()

    def add(self, table: CachedTable) -> None:
        """Append rows. The first ones say which columns there are."""
        for name, column in table.columns.items():
            if name not in self._layout:
                self._create(name, column)
            if isinstance(column, np.ndarray):
                self._numbers[name].add(column)
            else:
                assert isinstance(column, Flat)  # rows that share entries are not written
                self._jagged[name].add(column)

    def finish(self) -> CachedTable:
        """Close the files, and map the table."""
        self._open_files.close()
        (self._folder / LAYOUT).write_text(json.dumps(self._layout), encoding="utf-8")
        return open_table(self._folder)

    def _create(self, name: str, column: TableColumn) -> None:
        self._layout[name] = not isinstance(column, np.ndarray)
        if isinstance(column, np.ndarray):
            numbers = ArrayFile(self._folder / f"{name}.npy", column.dtype, column.shape[1:])
            self._numbers[name] = self._open_files.enter_context(numbers)
        else:
            jagged = FlatFile(self._folder, name, column.values.dtype)
            self._jagged[name] = self._open_files.enter_context(jagged)

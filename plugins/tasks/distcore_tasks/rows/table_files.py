"""Tables on disk: one or two files for each column, written in chunks of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distcore_tasks.rows.table import LAYOUT, CachedTable, TableColumn, open_table
from distcore_tasks.shared.arrays import ArrayFile
from distcore_tasks.shared.jagged import Flat, FlatFile, write_content


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
            if isinstance(column, Flat):
                self._jagged[name].add(column)
            else:
                self._numbers[name].add(column)

    def finish(self, content: Callable[[CachedTable], str]) -> CachedTable:
        """Close the files; write the digest that ``content`` returns of the rows. Map the table."""
        self._open_files.close()
        (self._folder / LAYOUT).write_text(json.dumps(self._layout), encoding="utf-8")
        table = open_table(self._folder)
        write_content(self._folder, content(table))
        return table

    def _create(self, name: str, column: TableColumn) -> None:
        self._layout[name] = isinstance(column, Flat)
        if isinstance(column, Flat):
            jagged = FlatFile(self._folder, name, column.values.dtype)
            self._jagged[name] = self._open_files.enter_context(jagged)
        else:
            numbers = ArrayFile(self._folder / f"{name}.npy", column.dtype)
            self._numbers[name] = self._open_files.enter_context(numbers)

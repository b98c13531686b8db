"""Rows of SQLite tables and views."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from distcore import DataError


class Sqlite:
    """Reads ``reviews.db``, if it has one table or view, or ``reviews.db?TABLE``: one of several.

    The order is that of the row numbers, or a view's own.
    """

    def read(self, source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        """Yield the values of ``columns``, config keys to names, in each row; raises DataError.

        Without columns each row is empty.
        """
        with _opened(source) as (database, table, there):
            if missing := [name for name in columns.values() if name not in there]:
                raise DataError(
                    f"{source}: no column {missing[0]!r} in {table} (it has {', '.join(there)})"
                )
            rows = database.execute(_select(database, table, list(columns.values()) or there))
            yield from rows if columns else (() for _ in rows)

    def digest(self, source: Path) -> str | None:
        """Return a digest of the rows; raises DataError."""
        total = hashlib.sha256()
        with _opened(source) as (database, table, there):
            for row in database.execute(_select(database, table, there)):
                total.update(repr(row).encode())
        return total.hexdigest()

    def sample(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write rows with the columns text, count and share to a new
        source, for ``distcore check``.
        """
        file = folder / "rows.db"
        with closing(sqlite3.connect(file)) as database:
            database.execute("CREATE TABLE rows (text TEXT, count INTEGER, share REAL)")
            database.executemany("INSERT INTO rows VALUES (:text, :count, :share)", rows)
            database.commit()
        return file


@contextmanager
def _opened(source: Path) -> Iterator[tuple[sqlite3.Connection, str, list[str]]]:
    """Open a database to read; yield it with the table and its columns. Every error is one
    line about the source.
    """
    name, _, table = str(source).partition("?")
    file = Path(name)
    if not file.is_file():
        raise DataError(f"{source}: no such file")
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if state != "ok":  # SQLite would give empty values for what is gone
                raise DataError(f"{source}: is damaged: {state}")
            master = (
                "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE"
                " 'sqlite_%'"
            )
            tables = [name for (name,) in database.execute(master)]
            if table not in tables and (table or len(tables) != 1):
                raise DataError(
                    f"{source}: name one of its tables, as in {file.name}?TABLE:"
                    f" {', '.join(tables)}"
                )
            table = table or tables[0]
            yield (
                database,
                table,
                [row[1] for row in database.execute(f"PRAGMA table_info({_quoted(table)})")],
            )
    except sqlite3.Error as error:
        raise DataError(f"{source}: {error}") from None


def _select(database: sqlite3.Connection, table: str, names: Sequence[str]) -> str:
    is_view = database.execute(
        "SELECT 1 FROM sqlite_master WHERE name = ? AND type = 'view'", (table,)
    ).fetchone()
    order = "" if is_view else " ORDER BY rowid"
    return f"SELECT {', '.join(map(_quoted, names))} FROM {_quoted(table)}{order}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

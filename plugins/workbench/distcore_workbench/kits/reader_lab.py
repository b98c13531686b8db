"""The laboratory of a reader's cases: sources with known rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from distcore.registry import load

Row = dict[str, Any]
ROWS: list[Row] = [
    {"text": 'a "quoted", plain one', "count": 1, "share": 0.5},
    {"text": "ünïcödé — 漢字", "count": -2, "share": 1e-9},
    {"text": "two\nlines", "count": 0, "share": 0.0},
    {"text": "", "count": 2**40, "share": -1.5},
]
COLUMNS = {f"columns.{name}": name for name in ROWS[0]}


@dataclass
class ReaderLab:
    """The reader, and sources with known rows."""

    name: str
    """Of its entry point, or ``file.py:Class``."""
    reader: Any
    """A module or an object with ``read`` and ``digest``."""
    folder: Path
    """For sources."""
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases that the reader declares not to keep, with reasons."""
        declared: Mapping[str, str] = getattr(self.reader, "exempt", {})
        return declared

    def source(self, rows: Sequence[Row] = ROWS) -> Path:
        """Write rows to a new source: by the reader's own ``sample``, or as JSON lines."""
        folder = self.folder / str(next(self._numbers))
        folder.mkdir()
        if hasattr(self.reader, "sample"):
            return Path(self.reader.sample(folder, rows))
        file = folder / "rows.jsonl"
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        file.write_text("".join(lines), encoding="utf-8")
        return file

    def read(
        self, source: Path, columns: Mapping[str, str] | None = None
    ) -> list[tuple[object, ...]]:
        """Return all rows of a source."""
        return [
            tuple(row) for row in self.reader.read(source, COLUMNS if columns is None else columns)
        ]


def reader_lab(name: str, settings: Mapping[str, Any], folder: Path) -> ReaderLab:
    """Return the lab of a reader, by its name or as ``file.py:Class``; raises DistcoreError if
    it does not import.
    """
    return ReaderLab(name, load_reader(name), folder)


def load_reader(name: str) -> Any:
    """Return a reader: a module or an object; of a class, a new one."""
    reader = load("readers", name)
    return reader() if isinstance(reader, type) else reader

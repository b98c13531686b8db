"""The columns of a data file, which the scripts look up by themselves."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path


def columns_of(file: str) -> list[str] | None:
    """Return the names of a file's columns in their order; ``None`` if it is not here or
    has none to read.
    """
    path = Path(file)
    packed = path.suffix == ".gz"
    kind = Path(path.stem).suffix if packed else path.suffix
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if packed
            else path.open(encoding="utf-8", newline="")
        ) as lines:
            if kind == ".csv":
                return next(csv.reader(lines), None)
            if kind not in (".json", ".jsonl"):
                return None
            first = next(line for line in lines if line.strip())
            try:
                row = json.loads(first)
            except ValueError:  # one list over many lines
                lines.seek(0)
                row = json.load(lines)
            row = row[0] if isinstance(row, list) and isinstance(row[0], dict) else row
            return list(row) if isinstance(row, dict) else None
    except (OSError, ValueError, KeyError, IndexError, StopIteration, EOFError):
        return None

"""The columns of a data file, which the scripts look up by themselves, and what of a file is not read here."""

from __future__ import annotations

import csv
import json
from pathlib import Path


def columns_of(file: str) -> list[str] | None:
    """Return the names of a file's columns in their order; ``None`` if it is not here or has none to read."""
    path = Path(file)
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            if path.suffix == ".csv":
                return next(csv.reader(lines), None)
            if path.suffix == ".jsonl" or is_lines(file):
                return list(json.loads(next(lines)))
            return list(json.load(lines)[0]) if path.suffix == ".json" else None
    except (OSError, ValueError, KeyError, IndexError, StopIteration):
        return None


def is_lines(file: str) -> bool:
    """Return True for a ``.json`` file with an object per line, which distcore calls ``.jsonl``."""
    path = Path(file)
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as text:
        return text.read(1) == "{"


def unreadable(file: str) -> str | None:
    """Return what to do with a file of a kind that the scripts read and distcore does not; ``None`` for the others."""
    if Path(file).suffix == ".txt":
        return 'text files are not read: write a line {"text": "…"} for each line or document into a .jsonl file'
    if is_lines(file):
        return "has an object per line: rename it to .jsonl"
    return None

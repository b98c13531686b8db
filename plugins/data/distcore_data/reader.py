"""The rows that ``distcore predict`` reads: the entry point ``files``
of the group ``distcore.readers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from distcore_data.files import read_records, source_digest
from distcore_data.formats.installed import folder_format
from distcore_data.splits import find_split


def read(source: Path, columns: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
    """Yield the values of ``columns`` in each row; raises DataError, as ``read_records`` does."""
    return read_records(find_split(str(source)) or source, columns)


def digest(source: Path) -> str | None:
    """Return a digest of the rows; ``None`` for a folder of something else. Raises DataError
    for a missing source.
    """
    if split := find_split(str(source)):
        return source_digest(split)
    return None if source.is_dir() and not folder_format(source) else source_digest(source)


def store(rows: object) -> str:
    """Write rows that a program has in memory to the cache; return the path to read them from.

    Raises DataError for rows that cannot be written exactly.
    """
    from distcore_data.in_memory import store as write

    return write(rows)

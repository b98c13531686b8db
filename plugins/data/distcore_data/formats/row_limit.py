"""The most that one row may hold, so that a damaged file, or a file of another kind, does
not fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TextIO

from distcore_data.cache import byte_setting

LIMIT = "DISTCORE_ROW_BYTES"
"""Environment variable with the most bytes of a line, a cell or a member; of a
text its characters count.
"""
BYTES = 2**28
"""Its default."""


class TooLong(str):
    """What stands for a line over the limit: no valid CSV, wherever it comes."""

    has_open_quote: bool

    def __new__(cls, quotes: int) -> TooLong:
        """``quotes``: the number of quotes in the line."""
        line = super().__new__(cls, '"too"long')
        line.has_open_quote = quotes % 2 == 1
        return line


def most_bytes() -> int:
    """Return the limit. Raises DataError for a variable that is no number."""
    return byte_setting(LIMIT, BYTES)


def over_limit(size: object = "more", unit: str = "bytes") -> str:
    """Return the problem of a row, or of one of its values, that has ``size`` of these units."""
    return f"has {size} {unit}, over the limit of {most_bytes()}; {LIMIT} sets another one"


LINE = partial(over_limit, unit="characters in a line")
"""Return the problem of a line."""


def bounded_lines(text: TextIO, drop: Callable[[str], object] = len) -> Iterator[str]:
    """Yield the lines of an open file, and a ``TooLong`` for each over the limit, whose
    parts go to ``drop``.
    """
    most = most_bytes()
    read = partial(text.readline, most + 1)
    for line in iter(read, ""):
        if len(line) <= most or line.endswith("\n"):
            yield line
            continue
        part, quotes = line, 0
        while part:
            quotes += part.count('"')
            drop(part)
            part = "" if part.endswith("\n") else read()
        yield TooLong(quotes)

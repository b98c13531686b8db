"""Rows of a source that are kept by a column and a regular expression."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from distcore import DataError
from distcore_data.splits import Split


@dataclass(frozen=True, slots=True)
class Filtered:
    """The rows of a source in which a column matches; its string is their name, for only
    these rows are counted.
    """

    source: Path | Split
    """The source of all rows."""
    column: str
    """The column to look at. In a row that is a list it is the last value."""
    matches: str
    """Regular expression to find in the value. It is not found in null."""

    def __str__(self) -> str:
        """Return ``reviews.csv where lang matches '^zh$'``."""
        return f"{self.source} where {self.column} matches {self.matches!r}"

    def keeps_none(self, name: str) -> DataError:
        """Return the error of a filter that keeps no row of the source ``name``."""
        return DataError(
            f"{name}: {self.column} of no row matches {self.matches!r}; change filter.matches"
        )

    def keeps(self, value: object) -> bool:
        """Return True for a row with this value; a list, an object or a truth value is read
        as JSON writes it.
        """
        is_json = isinstance(value, bool | list | dict)
        text = json.dumps(value, ensure_ascii=False, default=str) if is_json else str(value)
        return value is not None and re.search(self.matches, text) is not None

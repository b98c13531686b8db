"""Embedded datasets: texts from the source of the installed Python, under its license.

=================  ============================================================================
``stdlib-lines``   lines of the source of some packages, comments left out; none occurs twice
``stdlib-source``  the source files themselves
=================  ============================================================================

The same Python gives the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distcore_tasks.rows.texts import Texts
from distcore_tasks.shared import stdlib
from distcore_tasks.shared.schema import texts_schema
from distcore_tasks.shared.source_rows import Rows, given_rows

FORMAT = 1
"""Version of the rows, part of the cache key. Raise it when this module gives other rows."""
_LENGTHS = range(12, 51)


def stdlib_lines() -> Rows[Texts]:
    """Return the lines of 12 to 50 characters."""
    lines = (line.strip() for text in stdlib.documents() for line in text.splitlines())
    kept = dict.fromkeys(
        line for line in lines if len(line) in _LENGTHS and not line.startswith("#")
    )
    return _rows("stdlib-lines", kept)


def stdlib_source() -> Rows[Texts]:
    """Return the source files."""
    return _rows("stdlib-source", stdlib.documents())


def _rows(name: str, texts: Iterable[str]) -> Rows[Texts]:
    return given_rows(f"dataset {name}", ((text,) for text in texts), texts_schema({}, ["text"]))


MADE_FROM = (FORMAT, stdlib.DOCUMENTS)
"""Everything that the rows depend on, except for the Python version; part of the cache key."""
EMBEDDED: dict[str, Callable[[], Rows[Texts]]] = {
    "stdlib-lines": stdlib_lines,
    "stdlib-source": stdlib_source,
}
"""Map each dataset name, as in ``--data NAME``, to the function that returns its rows."""

"""Embedded datasets: texts from the source of the installed Python, under its license.

=================  ============================================================================
``stdlib-lines``   lines of the source of some packages, comments left out; none occurs twice
``stdlib-source``  the source files themselves
=================  ============================================================================

The same Python gives the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

from distcore_tasks.masked_lm.rows import Texts, check_texts
from distcore_tasks.shared import stdlib

FORMAT = 1
"""Version of the rows, part of the cache key. Raise it when this module gives other rows."""
_LENGTHS = range(12, 51)


def stdlib_lines() -> Texts:
    """Return the lines of 12 to 50 characters."""
    lines = (line.strip() for text in stdlib.documents() for line in text.splitlines())
    kept = dict.fromkeys(
        line for line in lines if len(line) in _LENGTHS and not line.startswith("#")
    )
    return check_texts("dataset stdlib-lines", kept)


def stdlib_source() -> Texts:
    """Return the source files."""
    return check_texts("dataset stdlib-source", stdlib.documents())


MADE_FROM = (FORMAT, stdlib.DOCUMENTS)
"""Everything that the rows depend on, except for the Python version; part of the cache key."""
EMBEDDED: dict[str, Callable[[], Texts]] = {
    "stdlib-lines": stdlib_lines,
    "stdlib-source": stdlib_source,
}
"""Map each dataset name, as in ``--data NAME``, to the function that returns its rows."""

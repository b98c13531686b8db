"""The embedded dataset: read from the source of the installed Python, under its license.

``stdlib-search``: the first paragraph of the docstring of a function or class, and the first line
of its code, as in a search for code. The same Python gives the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

from distcore_tasks.causal_lm.embedded import stdlib_help
from distcore_tasks.rows.texts import Texts
from distcore_tasks.shared import stdlib
from distcore_tasks.shared.schema import texts_schema
from distcore_tasks.shared.source_rows import Rows, given_rows

FORMAT = 1
"""Version of the rows, part of the cache key. Raise it when this module gives other rows."""


def stdlib_search() -> Rows[Texts]:
    """Return each docstring with the first line of its code."""
    pairs = ((text, code) for code, text in stdlib_help().values)
    return given_rows("dataset stdlib-search", pairs, texts_schema({}, ["anchor", "positive"]))


MADE_FROM = (FORMAT, stdlib.DOCUMENTS)
"""Everything that the rows depend on, except for the Python version; part of the cache key."""
EMBEDDED: dict[str, Callable[[], Rows[Texts]]] = {"stdlib-search": stdlib_search}
"""Map each dataset name, as in ``--data NAME``, to the function that returns its rows."""

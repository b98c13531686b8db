"""The embedded dataset: read from the source of the installed Python, under its license.

``stdlib-preferences``: the first line of a documented function or class, the first paragraph of its
docstring, and one of another docstring. The same Python gives the same rows in the same order.
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
DISTANCE = 7
"""Rows from a docstring to the other one, as neighbors are often alike."""


def stdlib_preferences() -> Rows[Texts]:
    """Return each first line, with its own docstring as chosen and another one as rejected."""
    pairs = list(stdlib_help().values)
    shifted = [*pairs[DISTANCE:], *pairs[:DISTANCE]]
    rows = []
    for (prompt, docstring), (_, other) in zip(pairs, shifted, strict=True):
        if docstring != other:
            rows.append((prompt, docstring, other))
    texts = texts_schema({}, ["prompt", "chosen", "rejected"])
    return given_rows("dataset stdlib-preferences", rows, texts)


MADE_FROM = (FORMAT, stdlib.DOCUMENTS)
"""Everything that the rows depend on, except for the Python version; part of the cache key."""
EMBEDDED: dict[str, Callable[[], Rows[Texts]]] = {"stdlib-preferences": stdlib_preferences}
"""Map each dataset name, as in ``--data NAME``, to the function that returns its rows."""

"""Texts, checked one by one; without a file those that come with the installed Python, under its license.

=================  ============================================================================
``stdlib-lines``   lines of the source of some packages, comments left out; none occurs twice
``stdlib-source``  the source files themselves
=================  ============================================================================

The same Python gives the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from distcore import DataError
from distcore.data import Source, read_records, row_error, source_name
from distcore_tasks import stdlib
from distcore_tasks.masked_lm.options import Columns
from distcore_tasks.rereading import Values, kept
from distcore_tasks.sources import text_problem

FORMAT = 1
"""Version of the embedded rows, part of the cache key: raise it when this module gives other rows."""
_LENGTHS = range(12, 51)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in file order; implements ``distcore_tasks.parts.Rows``."""

    name: str
    """What error messages call these rows, such as ``data file texts.jsonl``."""
    values: Values[str]
    """Not blank, and valid Unicode."""


def read_texts(source: Source, columns: Columns) -> Texts:
    """Read a data file or split; raises DataError: where, the row (counted from 1), what was found and what to do."""
    name, asked = source_name(source), {f"columns.{column}": name for column, name in asdict(columns).items()}
    return _some(Texts(name, kept(source, lambda: _checked(name, (text for (text,) in read_records(source, asked))))))


def check_texts(name: str, texts: Iterable[object]) -> Texts:
    """Check the texts one by one; ``name`` opens every message. Raises DataError."""
    return _some(Texts(name, list(_checked(name, texts))))


def _some(texts: Texts) -> Texts:
    if not len(texts.values):
        raise DataError(f"{texts.name}: holds no rows")
    return texts


def _checked(name: str, texts: Iterable[object]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        if problem := text_problem(text):
            raise row_error(name, number, problem)
        yield str(text)


def stdlib_lines() -> Texts:
    """Return the lines of 12 to 50 characters, without those around them."""
    lines = (line.strip() for text in stdlib.documents() for line in text.splitlines())
    kept = dict.fromkeys(line for line in lines if len(line) in _LENGTHS and not line.startswith("#"))
    return check_texts("data set stdlib-lines", kept)


def stdlib_source() -> Texts:
    """Return the source files."""
    return check_texts("data set stdlib-source", stdlib.documents())


def fingerprint(name: str) -> str:
    """Return a digest that stands for the content of an embedded data set, from the Python version: no text is read."""
    return stdlib.fingerprint(name, FORMAT, stdlib.DOCUMENTS)


EMBEDDED: dict[str, Callable[[], Texts]] = {"stdlib-lines": stdlib_lines, "stdlib-source": stdlib_source}
"""Name, as in ``--data NAME``, to the function that returns its rows."""

"""Embedded datasets: both are read from the source of the installed Python, under its license.

``stdlib-source``
    Documents: the source files of some packages of the standard library, one per row.
``stdlib-help``
    Prompts and completions: the first line of a documented function or class, and the first
    paragraph of its docstring.

The same Python gives the same rows in the same order.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any

from distcore_tasks.causal_lm.forms import columns_of, row_problem, row_value
from distcore_tasks.causal_lm.options import Columns, Form
from distcore_tasks.shared import stdlib
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.source_rows import Rows, given_rows

FORMAT = 1
"""Version of the rows, part of the cache key. Raise it when this module gives other rows."""
_LENGTHS = range(12, 200)
"""Lengths, in characters, of the prompts and completions that are kept."""


def stdlib_source() -> Rows[str]:
    """Return the source files as documents."""
    documents = ((text,) for text in stdlib.documents())
    return given_rows("dataset stdlib-source", documents, _schema("documents"))


def stdlib_help() -> Rows[tuple[str, str]]:
    """Return the first line of each documented function and class with the first
    paragraph of its docstring.
    """
    pairs = {
        f"{_first_line(node)}\n": text for node, text in stdlib.documented(stdlib.DOCUMENTS.split())
    }
    kept = (
        (prompt, text)
        for prompt, text in pairs.items()
        if len(prompt) in _LENGTHS and len(text) in _LENGTHS
    )
    return given_rows("dataset stdlib-help", kept, _schema("prompts"))


def _schema(form: Form) -> Schema[Any]:
    columns = columns_of(form, Columns())
    return Schema(columns, partial(row_problem, form), partial(row_value, form))


MADE_FROM = (FORMAT, stdlib.DOCUMENTS)
"""Everything that the rows depend on, except for the Python version; part of the cache key."""
EMBEDDED: dict[str, Callable[[], Rows[Any]]] = {
    "stdlib-source": stdlib_source,
    "stdlib-help": stdlib_help,
}
"""Map each dataset name, as in ``--data NAME``, to the function that returns its rows."""
FORMS: dict[str, Form] = {"stdlib-source": "documents", "stdlib-help": "prompts"}
"""Form of the rows of each."""


def _first_line(node: stdlib.Definition) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"def {node.name}({ast.unparse(node.args)}):"
    bases = ", ".join(map(ast.unparse, node.bases))
    return f"class {node.name}({bases}):" if bases else f"class {node.name}:"

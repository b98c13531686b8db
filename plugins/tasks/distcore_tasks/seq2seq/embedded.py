"""Embedded datasets: both are read from the source of the installed Python, under its license.

================  =================================================================================
``stdlib-words``  a name in the source of the standard library, and its words:
                  ``_getDefaultRoot``, ``get default root``
``stdlib-names``  the first paragraph of the docstring of a function or class, and its name
================  =================================================================================

No source occurs twice, so no evaluation row has the source of a training row. The same Python gives
the same rows in the same order.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from distcore_tasks.rows.texts import Texts
from distcore_tasks.shared import stdlib
from distcore_tasks.shared.schema import texts_schema
from distcore_tasks.shared.source_rows import Rows, given_rows

FORMAT = 1
"""Version of the rows, part of the cache key. Raise it when this module gives other rows."""
MODULES = (
    "argparse ast asyncio base64 calendar cmd codecs collections concurrent configparser contextlib"
    " copy csv dataclasses difflib email enum fractions functools getopt gettext glob graphlib gzip"
    " heapq html http inspect io ipaddress json linecache logging mailbox multiprocessing numbers"
    " operator optparse os pathlib pdb pickle platform pprint queue random reprlib selectors shelve"
    " shlex shutil socket statistics string subprocess tarfile tempfile textwrap threading timeit"
    " tokenize traceback types typing unittest urllib uuid warnings weakref xml zipfile"
)
"""Modules and packages with the sources of the rows."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_WORDS = range(2, 6)
"""Numbers of words of the names that are kept."""
_LENGTHS = range(12, 400)
"""Lengths, in characters, of the paragraphs that are kept."""


def stdlib_words() -> Rows[Texts]:
    """Return names of several words, each with its words in lower case, in
    order of first occurrence.
    """
    words_by_name = {name: _WORD.findall(name) for name in _names()}
    rows = (
        (name, " ".join(words).lower())
        for name, words in words_by_name.items()
        if len(words) in _WORDS
    )
    return _rows("stdlib-words", rows)


def stdlib_names() -> Rows[Texts]:
    """Return the first paragraph of each docstring with the documented name.

    Repeated paragraphs are dropped.
    """
    names: dict[str, str] = {}
    for node, text in stdlib.documented(MODULES.split()):
        if len(text) in _LENGTHS:
            names.setdefault(text, node.name)
    return _rows("stdlib-names", names.items())


def _rows(name: str, pairs: Iterable[Texts]) -> Rows[Texts]:
    return given_rows(f"dataset {name}", pairs, texts_schema({}, ["source", "target"]))


MADE_FROM = (FORMAT, MODULES)
"""Everything that the rows depend on, except for the Python version; part of the cache key."""
EMBEDDED: dict[str, Callable[[], Rows[Texts]]] = {
    "stdlib-words": stdlib_words,
    "stdlib-names": stdlib_names,
}
"""Map each dataset name, as in ``--data NAME``, to the function that returns its rows."""


def _names() -> Iterator[str]:
    """Yield every name in the sources: of functions, classes,
    arguments, variables and attributes.
    """
    for path in stdlib.source_files(Path(sysconfig.get_path("stdlib")), MODULES.split()):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name):
                    yield name
                case ast.Attribute(attr=name) | ast.arg(arg=name):
                    yield name

"""Embedded data sets, which need no file. ``stdlib-names``: what a function does, and what it is called.

The source of a row is the first paragraph of the docstring of a function or class in the standard library of the
running Python, the target its name. Of several definitions with one docstring the first is kept, so no evaluation row
has the source of a training row. The same Python gives the same rows in the same order, under its license.
"""

from __future__ import annotations

from collections.abc import Callable

from distcore.tasks import stdlib
from distcore.tasks.seq2seq.rows import Pairs, check_pairs

FORMAT = 1
"""Version of the rows, part of the cache key: raise it when this module gives other rows."""
MODULES = (
    "argparse ast asyncio base64 calendar cmd codecs collections concurrent configparser contextlib copy csv "
    "dataclasses difflib email enum fractions functools getopt gettext glob graphlib gzip heapq html http inspect io "
    "ipaddress json linecache logging mailbox multiprocessing numbers operator optparse os pathlib pdb pickle platform "
    "pprint queue random reprlib selectors shelve shlex shutil socket statistics string subprocess tarfile tempfile "
    "textwrap threading timeit tokenize traceback types typing unittest urllib uuid warnings weakref xml zipfile"
)
"""Modules and packages whose functions and classes are the rows."""
_LENGTHS = range(12, 400)
"""Characters of a source that is kept."""


def fingerprint(name: str) -> str:
    """Return a digest that stands for the content of an embedded data set, from the Python version: no text is read."""
    return stdlib.fingerprint(name, FORMAT, MODULES)


def stdlib_names() -> Pairs:
    """Return the first paragraph of each docstring with the name of what it documents."""
    names: dict[str, str] = {}
    for node, text in stdlib.documented(MODULES.split()):
        if len(text) in _LENGTHS:
            names.setdefault(text, node.name)
    return check_pairs("data set stdlib-names", names.items())


EMBEDDED: dict[str, Callable[[], Pairs]] = {"stdlib-names": stdlib_names}
"""Name, as in ``--data NAME``, to the function that returns its rows."""

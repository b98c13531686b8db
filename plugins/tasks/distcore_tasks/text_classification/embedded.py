"""Embedded datasets: paragraphs of Python's own docstrings.

``stdlib-docs``: paragraphs, labeled by subject. The texts are docstrings of modules, classes and
functions in the standard library of the running Python. ``ast`` parses the source files, so nothing
is imported. Each docstring is split into paragraphs. Paragraphs with code examples are dropped. The
label of a row is the subject of its module, by ``SUBJECTS``.

=================  ====================================================================
classes            concurrency, data types, development tools, files, graphics, language,
                   networking, text
rows               some 9,400 (Python 3.11; fewer on a system without some modules)
majority class     about 17 % of the rows (development tools)
license            PSF License Agreement, as for Python itself; texts are read from the
                   installed Python
=================  ====================================================================

The same Python gives the same rows in the same order. Texts that differ only in case, spaces,
digits or punctuation are duplicates. Only the first duplicate is kept, and a text under several
subjects is dropped. So no evaluation row duplicates a training row, although both datasets may have
paragraphs of one module.

``stdlib-pairs``: the first two paragraphs of a docstring, ``in order`` or ``swapped``, about half
each; some 1,900 rows (Python 3.11). A model can tell the two orders apart, because the first
paragraph is a summary and the second has details. Each docstring gives at most one pair, and no
paragraph is in two pairs.
"""

from __future__ import annotations

import ast
import json
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from distcore_data import cached_folder
from distcore_tasks.shared import stdlib
from distcore_tasks.shared.source_rows import Rows, given_rows
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.records import LabeledText, schema_of

FORMAT = 2
"""Version of the rows, part of the cache key. Raise it when this module gives other rows."""

SUBJECTS = {
    "concurrency": (
        "asyncio concurrent multiprocessing threading _threading_local queue sched selectors"
        " subprocess signal contextvars _weakrefset asyncore"
    ),
    "data types": (
        "_pydecimal _collections_abc _pydatetime _strptime array bisect calendar collections"
        " colorsys copy dataclasses datetime decimal enum fractions functools graphlib heapq"
        " ipaddress numbers operator random reprlib secrets statistics types uuid weakref zoneinfo"
    ),
    "development tools": (
        "ast bdb cProfile code codeop compileall dis doctest ensurepip faulthandler inspect"
        " linecache logging pdb pickletools profile pstats py_compile pyclbr pydoc rlcompleter"
        " symtable timeit tokenize trace traceback tracemalloc unittest venv warnings zipapp"
    ),
    "files": (
        "_pyio bz2 dbm filecmp fileinput fnmatch genericpath glob gzip io lzma mailbox ntpath os"
        " pathlib pickle posixpath shelve shutil sqlite3 stat tarfile tempfile wave zipfile"
        " zipimport"
    ),
    "graphics": "tkinter turtle curses",
    "language": (
        "__future__ abc contextlib copyreg ctypes importlib keyword modulefinder opcode pkgutil"
        " platform runpy site sysconfig typing"
    ),
    "networking": (
        "ftplib http imaplib nntplib poplib smtpd smtplib socket socketserver ssl telnetlib urllib "
        "webbrowser wsgiref xmlrpc"
    ),
    "text": (
        "argparse base64 codecs configparser csv difflib email encodings getopt gettext html json"
        " locale optparse plistlib pprint quopri re shlex string stringprep textwrap tomllib xml"
    ),
}
"""Map each subject to its top-level modules and packages, separated by spaces."""

_LENGTHS = range(40, 1001)
"""Lengths, in characters, of the paragraphs that are kept."""


def stdlib_docs() -> Rows[LabeledText]:
    """Return the rows, from the cache if it has them. Collecting them takes some seconds."""
    rows = _cached("stdlib-docs", collect)
    return given_rows("dataset stdlib-docs", rows, schema_of(Columns()))


def stdlib_pairs() -> Rows[LabeledText]:
    """Return the pairs of paragraphs, from the cache if it has them."""
    rows = _cached("stdlib-pairs", collect_pairs)
    return given_rows("dataset stdlib-pairs", rows, schema_of(Columns(text_pair="text_pair")))


MADE_FROM = (FORMAT, SUBJECTS)
"""Inputs of the rows, except for the Python version; part of the cache key."""
EMBEDDED: dict[str, Callable[[], Rows[LabeledText]]] = {
    "stdlib-docs": stdlib_docs,
    "stdlib-pairs": stdlib_pairs,
}
"""Map each dataset name, as in ``--data NAME``, to the function that returns its rows."""


def collect(library: Path) -> list[tuple[str, str]]:
    """Return (paragraph, subject) of each paragraph under ``library``, by subject, then by path."""
    subjects: dict[str, set[str]] = {}
    rows: dict[str, tuple[str, str]] = {}
    for subject, modules in SUBJECTS.items():
        for path in stdlib.source_files(library, modules.split()):
            for text in chain.from_iterable(_docstrings(path)):
                letters = _letters(text)
                subjects.setdefault(letters, set()).add(subject)
                rows.setdefault(letters, (text, subject))
    # A paragraph that modules of two subjects share has no label.
    return [row for letters, row in rows.items() if len(subjects[letters]) == 1]


def collect_pairs(library: Path) -> list[tuple[str, str, str]]:
    """Return (paragraph, paragraph, label) for each docstring of two paragraphs or more."""
    rows: list[tuple[str, str, str]] = []
    seen: set[str] = set()
    modules = chain.from_iterable(names.split() for names in SUBJECTS.values())
    files = stdlib.source_files(library, modules)
    for paragraphs in chain.from_iterable(map(_docstrings, files)):
        if len(paragraphs) < 2:
            continue
        first, second, *_ = paragraphs
        letters = {_letters(first), _letters(second)}
        if not seen & letters:
            # Half of the pairs, and the same ones in every process, unlike by hash().
            is_swapped = zlib.crc32(first.encode()) % 2 == 1
            rows.append((second, first, "swapped") if is_swapped else (first, second, "in order"))
        seen |= letters
    return rows


def _cached(name: str, collect: Callable[[Path], list[Any]]) -> list[Any]:
    """Return the rows of a dataset from the cache, which ``collect`` fills from the library."""

    def write(folder: Path) -> None:
        rows = collect(Path(sysconfig.get_path("stdlib")))
        text = json.dumps(rows, ensure_ascii=False)
        (folder / "rows.json").write_text(text, encoding="utf-8")

    key = stdlib.fingerprint(name, *MADE_FROM)[:32]
    folder = cached_folder("embedded", f"{name}-{key}", write)
    rows: list[Any] = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    return rows


def _letters(text: str) -> str:
    """Return the key of duplicates: the letters of a text, in lower case."""
    return "".join(filter(str.isalpha, text.lower()))


def _docstrings(path: Path) -> Iterator[list[str]]:
    """Yield the prose paragraphs of each docstring in a source file, each as one line."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, documented):
            paragraphs = re.split(r"\n\s*\n", ast.get_docstring(node) or "")
            on_one_line = (" ".join(paragraph.split()) for paragraph in paragraphs)
            yield list(filter(_is_prose, on_one_line))


def _is_prose(text: str) -> bool:
    """Return True for sentences of a usual length: no table, and no example of code."""
    return (
        len(text) in _LENGTHS and ">>>" not in text and bool(re.search(r"[a-z]{3} [a-z]{2}", text))
    )

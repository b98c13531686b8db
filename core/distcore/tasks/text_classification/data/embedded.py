"""Embedded data sets, which need no file. ``stdlib-docs``: paragraphs of Python's own docstrings, labelled by subject.

The texts are the docstrings of the modules, classes and functions of the standard library of the running Python,
parsed from its source with ``ast`` (nothing is imported) and cut into paragraphs; paragraphs with code examples are
left out. The label of a row is the subject of the module that it comes from, as ``SUBJECTS`` lists them.

=================  ====================================================================
classes            concurrency, data types, development tools, files, graphics, language,
                   networking, text
rows               some 9,400 (Python 3.11; fewer where a system leaves modules out)
majority class     about 17 % of the rows (development tools)
license            PSF License Agreement, as for Python itself; texts are read from the installed Python
=================  ====================================================================

The same Python gives the same rows in the same order. Texts that differ only in case, spaces, digits or punctuation
count as duplicates, and only the first of them is kept; texts that occur under several subjects are left out. So no
evaluation row is a duplicate of a training row. Paragraphs of one module may still be in both parts.
"""

from __future__ import annotations

import ast
import json
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from distcore.data.cache import cached_folder
from distcore.tasks import stdlib
from distcore.tasks.text_classification.data.labelled import Rows, check_rows

FORMAT = 2
"""Version of the rows, part of the cache key: raise it when this module gives other rows."""

SUBJECTS = {
    "concurrency": "asyncio concurrent multiprocessing threading _threading_local queue sched selectors subprocess "
    "signal contextvars _weakrefset asyncore",
    "data types": "_pydecimal _collections_abc _pydatetime _strptime array bisect calendar collections colorsys copy "
    "dataclasses datetime decimal enum fractions functools graphlib heapq ipaddress numbers operator random "
    "reprlib secrets statistics types uuid weakref zoneinfo",
    "development tools": "ast bdb cProfile code codeop compileall dis doctest ensurepip faulthandler inspect "
    "linecache logging pdb pickletools profile pstats py_compile pyclbr pydoc rlcompleter symtable timeit tokenize "
    "trace traceback tracemalloc unittest venv warnings zipapp",
    "files": "_pyio bz2 dbm filecmp fileinput fnmatch genericpath glob gzip io lzma mailbox ntpath os pathlib pickle "
    "posixpath shelve shutil sqlite3 stat tarfile tempfile wave zipfile zipimport",
    "graphics": "tkinter turtle curses",
    "language": "__future__ abc contextlib copyreg ctypes importlib keyword modulefinder opcode pkgutil platform "
    "runpy site sysconfig typing",
    "networking": "ftplib http imaplib nntplib poplib smtpd smtplib socket socketserver ssl telnetlib urllib "
    "webbrowser wsgiref xmlrpc",
    "text": "argparse base64 codecs configparser csv difflib email encodings getopt gettext html json locale "
    "optparse plistlib pprint quopri re shlex string stringprep textwrap tomllib xml",
}
"""Subject to the names of the top-level modules and packages that belong to it, separated by spaces."""

_LENGTHS = range(40, 1001)
"""Characters of a paragraph that is kept."""


def stdlib_docs() -> Rows:
    """Return the rows, from the cache if they are there; collecting them takes some seconds."""
    folder = cached_folder("embedded", f"stdlib-docs-{fingerprint('stdlib-docs')[:32]}", _write)
    return check_rows("data set stdlib-docs", json.loads((folder / "rows.json").read_text(encoding="utf-8")))


EMBEDDED: dict[str, Callable[[], Rows]] = {"stdlib-docs": stdlib_docs}
"""Name, as in ``--data NAME``, to the function that returns its rows."""


def fingerprint(name: str) -> str:
    """Return a digest that stands for the content of an embedded data set, from the Python version: no text is read."""
    return stdlib.fingerprint(name, FORMAT, SUBJECTS)


def collect(library: Path) -> list[tuple[str, str]]:
    """Return (paragraph, subject) for each paragraph of the modules under ``library``, by subject, then by path."""
    subjects: dict[str, set[str]] = {}
    rows: dict[str, tuple[str, str]] = {}
    for subject, modules in SUBJECTS.items():
        for path in stdlib.source_files(library, modules.split()):
            for text in _paragraphs(path):
                letters = "".join(filter(str.isalpha, text.lower()))  # duplicates have the same letters
                subjects.setdefault(letters, set()).add(subject)
                rows.setdefault(letters, (text, subject))
    return [row for letters, row in rows.items() if len(subjects[letters]) == 1]


def _write(folder: Path) -> None:
    rows = collect(Path(sysconfig.get_path("stdlib")))
    (folder / "rows.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


def _paragraphs(path: Path) -> Iterator[str]:
    """Yield the prose paragraphs of all docstrings in a source file, each on one line."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, documented):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                text = " ".join(paragraph.split())
                if len(text) in _LENGTHS and ">>>" not in text and re.search(r"[a-z]{3} [a-z]{2}", text):
                    yield text

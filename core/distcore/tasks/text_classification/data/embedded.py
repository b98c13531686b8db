"""Data sets that need no file. ``stdlib-docs``: paragraphs of Python's own docstrings, labelled by subject.

The texts are the documentation strings of modules, classes and functions of the standard library that runs
distcore, read from its source with ``ast`` (nothing is imported), cut into paragraphs, without code examples.
A row's label is the subject of the module that it comes from; ``SUBJECTS`` is the whole map.

=================  ====================================================================
classes            concurrency, data types, development tools, files, graphics, language,
                   networking, text
rows               some 9,400 (Python 3.11; modules that a system leaves out are left out)
majority share     about 17 % (development tools)
license            PSF License Agreement, as for Python itself; texts are read in place, not copied
=================  ====================================================================

Rows are the same, in the same order, for the same Python. Texts that differ in case, spaces, digits or punctuation only
are one text, and it is left out altogether if modules of different subjects hold it: so no row of the evaluation
part has a twin in the training part. A paragraph may still share its module, and its module's words, with others.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from distcore.data.cache import cached_folder
from distcore.tasks.text_classification.data.files import Rows, check_rows

FORMAT = 2
"""Grows whenever the rows change, so that caches notice."""

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
"""Subject to the top-level modules whose docstrings carry it."""

_SKIPPED = {"test", "tests", "idle_test", "__pycache__", "_bundled"}
_LENGTHS = range(40, 1001)


def stdlib_docs() -> Rows:
    """Harvest the rows: some seconds without the cache, some milliseconds with it."""
    folder = cached_folder("embedded", f"stdlib-docs-{fingerprint('stdlib-docs')[:32]}", _write)
    return check_rows("data set stdlib-docs", json.loads((folder / "rows.json").read_text(encoding="utf-8")))


EMBEDDED: dict[str, Callable[[], Rows]] = {"stdlib-docs": stdlib_docs}
"""Name, as in ``--data NAME``, to what reads it."""


def fingerprint(name: str) -> str:
    """Name the content of an embedded data set without reading it: it follows from the installed Python."""
    facts = [name, FORMAT, sys.version, sysconfig.get_path("stdlib"), SUBJECTS]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def harvest(library: Path) -> list[tuple[str, str]]:
    """Return (paragraph, subject) for the modules under ``library``, in the order of subjects and paths."""
    subjects: dict[str, set[str]] = {}
    rows: dict[str, tuple[str, str]] = {}
    for subject, modules in SUBJECTS.items():
        for path in _sources(library, modules.split()):
            for text in _paragraphs(path):
                likeness = "".join(filter(str.isalpha, text.lower()))
                subjects.setdefault(likeness, set()).add(subject)
                rows.setdefault(likeness, (text, subject))
    return [row for likeness, row in rows.items() if len(subjects[likeness]) == 1]


def _write(folder: Path) -> None:
    rows = harvest(Path(sysconfig.get_path("stdlib")))
    (folder / "rows.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


def _sources(library: Path, modules: list[str]) -> Iterator[Path]:
    for module in modules:
        paths = [library / f"{module}.py", *sorted((library / module).rglob("*.py"))]
        for path in paths:
            if path.is_file() and not _SKIPPED.intersection(path.relative_to(library).parts):
                yield path


def _paragraphs(path: Path) -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, documented):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                text = " ".join(paragraph.split())
                if len(text) in _LENGTHS and ">>>" not in text and re.search(r"[a-z]{3} [a-z]{2}", text):
                    yield text

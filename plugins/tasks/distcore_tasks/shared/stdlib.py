"""Source files of the standard library, as data that every machine has."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

DOCUMENTS = (
    "argparse ast asyncio base64 calendar cmd codecs collections concurrent configparser contextlib"
    " copy csv dataclasses difflib email enum fractions functools getopt gettext glob graphlib gzip"
    " heapq html http inspect io json linecache logging numbers operator optparse os pathlib pprint"
    " queue random reprlib selectors shelve shlex shutil statistics string subprocess tempfile"
    " textwrap threading timeit tokenize traceback types"
)
"""Modules and packages with the documents for a language model."""
Definition = ast.ClassDef | ast.FunctionDef
_SKIPPED = {"test", "tests", "idle_test", "__pycache__", "_bundled"}


def source_files(library: Path, modules: Iterable[str]) -> Iterator[Path]:
    """Yield the source files of the modules and packages under ``library``, without
    tests and bundled wheels.
    """
    for module in modules:
        paths = [library / f"{module}.py", *sorted((library / module).rglob("*.py"))]
        for path in paths:
            if path.is_file() and not _SKIPPED.intersection(path.relative_to(library).parts):
                yield path


def documents() -> Iterator[str]:
    """Yield the text of each source file of ``DOCUMENTS`` with at least 200 characters."""
    for path in source_files(Path(sysconfig.get_path("stdlib")), DOCUMENTS.split()):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= 200:
            yield text


def documented(modules: Iterable[str]) -> Iterator[tuple[Definition, str]]:
    """Yield functions and classes with a docstring, and the first paragraph of the
    docstring on one line.
    """
    for path in source_files(Path(sysconfig.get_path("stdlib")), modules):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, Definition) and (text := ast.get_docstring(node)):
                yield node, " ".join(text.split("\n\n")[0].split())


def fingerprint(name: str, *made_from: object) -> str:
    """Return a digest for the content of an embedded dataset, without reading a file.

    ``made_from``: everything that the rows depend on, except for the Python version.
    """
    everything = [name, *made_from, sys.version, sysconfig.get_path("stdlib")]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()

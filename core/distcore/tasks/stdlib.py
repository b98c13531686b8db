"""Source files of the running Python's standard library: data that every machine has."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

_SKIPPED = {"test", "tests", "idle_test", "__pycache__", "_bundled"}


def source_files(library: Path, modules: Iterable[str]) -> Iterator[Path]:
    """Yield the source files of the modules and packages under ``library``, tests and bundled wheels left out."""
    for module in modules:
        paths = [library / f"{module}.py", *sorted((library / module).rglob("*.py"))]
        for path in paths:
            if path.is_file() and not _SKIPPED.intersection(path.relative_to(library).parts):
                yield path


def fingerprint(*facts: object) -> str:
    """Return a digest that stands for the content of data made from these files, as ``facts`` say how: none is read."""
    everything = [*facts, sys.version, sysconfig.get_path("stdlib")]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()

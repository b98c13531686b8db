"""Rows that a program gives in place of the name of a file: ``RunConfig(data=frame)``.

A config is a file, and ranks are other processes: the reader of data files keeps such rows in its
cache, and the config names the path there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from distcore import registry
from distcore.config.short_keys import OPTIONS, task_class
from distcore.errors import ConfigError

READER = "files"
"""The entry point of ``distcore.readers`` that reads and keeps rows of any source."""
LIBRARIES = frozenset({"datasets", "pandas", "polars", "pyarrow"})
"""Packages whose objects are rows."""


def is_rows(value: object) -> bool:
    """Return True for rows rather than a value of a config: a list of dicts, or a table."""
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping)
    library = type(value).__module__.partition(".")[0]
    return library in LIBRARIES


def stored(rows: object) -> str:
    """Keep rows where each rank finds them; return their path.

    Raises ConfigError if nothing installed can, and DataError for rows that cannot be kept.
    """
    if READER not in registry.offers("readers"):
        raise ConfigError(
            "rows in memory: no package is installed that keeps them for the ranks; write them to"
            " a file, and name that"
        )
    return str(registry.load("readers", READER).store(rows))


def with_rows_in_files(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with paths in place of rows, where an option of the task takes a text."""
    changed = dict(tree)
    options = tree.get(OPTIONS)
    groups = [changed]
    if isinstance(options, Mapping):
        changed[OPTIONS] = dict(options)
        groups.append(changed[OPTIONS])
    if not any(_has_rows(value) for group in groups for value in group.values()):
        return changed
    text_options = _text_options(str(tree.get("task", "auto")))
    for group in groups:
        for name in group.keys() & text_options:
            group[name] = _in_files(group[name])
    return changed


def _has_rows(value: object) -> bool:
    """Return True for rows, and for rows by name, such as several evaluation sets."""
    if is_rows(value):
        return True
    return isinstance(value, Mapping) and any(map(is_rows, value.values()))


def _in_files(value: object) -> object:
    # First: a dataset of several splits is a mapping, too.
    if is_rows(value):
        return stored(value)
    if isinstance(value, Mapping):
        return {name: _in_files(rows) for name, rows in value.items()}
    return value


def _text_options(task: str) -> Collection[str]:
    """Return the options of a task that take a text, and so the path of rows."""
    cls = task_class(task)
    if cls is None or not dataclasses.is_dataclass(cls):
        return ()
    return {
        field.name
        for field in dataclasses.fields(cls)
        if re.match(r"(<class ')?str\b", str(field.type))
    }

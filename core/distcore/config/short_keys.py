"""Short keys: an unknown key at the top of a config is an option of its task."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from distcore import registry
from distcore.errors import ConfigError, StrategyError

GIVEN = "object:"
"""Begins the name of a task that was given to ``train`` as an object and has no other name."""
OPTIONS = "task_options"
"""The key below which a config has the options of its task."""


def option_names(task: str) -> Collection[str] | None:
    """Return the names of a task's options; ``None`` if the task cannot be asked, for example
    because it is missing.

    ``auto`` is the default task. Imports the module of the task.
    """
    if task.startswith(GIVEN):
        return None
    try:
        cls = registry.load("tasks", registry.default_task() if task == "auto" else task)
    except StrategyError:  # building the task raises the same error, with nothing else in its way
        return None
    return (
        [field.name for field in dataclasses.fields(cls) if field.init]
        if dataclasses.is_dataclass(cls)
        else ()
    )


def full_key(dotted: str, keys: Collection[str], options: Collection[str] | None = None) -> str:
    """Expand a short key: ``columns.text`` gives ``task_options.columns.text``.

    ``keys`` are those at the top of a config. ``options`` are those of the task; ``None``: any
    name may be one.
    """
    first = dotted.partition(".")[0]
    is_short = first not in keys and (options is None or first in options)
    return f"{OPTIONS}.{dotted}" if is_short else dotted


def with_task_options(
    tree: Mapping[str, Any], keys: Collection[str], task: str | None = None, source: str = "config"
) -> dict[str, Any]:
    """Return ``tree`` with the options of its task, or of ``task``, moved from
    the top into ``task_options``.

    ``keys`` are the top-level keys of a config. Unknown keys stay in place. Raises ConfigError,
    which names ``source``, if an option is given in both places.
    """
    others = [key for key in tree if key not in keys and isinstance(key, str)]
    options = tree.get(OPTIONS) or {}
    if not others or not isinstance(options, dict):
        return dict(tree)
    known = option_names(task or str(tree.get("task", "auto")))
    short = {key: tree[key] for key in others if known is None or key in known}
    if twice := sorted(short.keys() & options.keys()):
        raise ConfigError(
            f"{source}: {twice[0]!r} is short for '{OPTIONS}.{twice[0]}', which is set too;"
            " keep one"
        )
    rest = {key: value for key, value in tree.items() if key not in short}
    return rest | {OPTIONS: short | options} if short else rest

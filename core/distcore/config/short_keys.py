"""Short keys: at the top of a config an unknown key is an option of its task, or a flag's name."""

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
OF_FLAGS = {
    "clip_norm": "clip.norm",
    "keep_last": "checkpoints.keep_last",
    "length_grouping": "loader.length_grouping",
    "warmup": "schedule.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}
"""Names of the command line's flags, each with the key of another name that it sets."""
NAME_ALONE = {"optimizer": "name", "schedule": "name"}
NUMBER_ALONE = {"lora": "rank", "ema": "decay"}
"""Groups of keys, each with the key that a name, or a number, in place of the group is for."""


def option_names(task: str) -> Mapping[str, str] | None:
    """Return short names of a task's options, each with the option, such as ``columns.text``;
    ``None`` if the task cannot be asked, for example because it is missing.

    Short names are the options themselves, and the flags of nested ones, such as ``text_column``.
    ``auto`` is the default task. Imports the module of the task.
    """
    cls = task_class(task)
    if cls is None:
        return None
    if not dataclasses.is_dataclass(cls):
        return {}
    options = {field.name: field.name for field in dataclasses.fields(cls) if field.init}
    flags = getattr(cls, "flags", {})
    if not isinstance(flags, Mapping):
        return options
    return {flag.replace("-", "_"): option for flag, option in flags.items()} | options


def task_class(task: str) -> Any:
    """Return the class of a task, ``auto`` of the default one; ``None`` if it cannot be asked."""
    if task.startswith(GIVEN):
        return None
    try:
        return registry.load("tasks", registry.default_task() if task == "auto" else task)
    except StrategyError:  # building the task raises the same error, with nothing else in its way
        return None


def full_key(dotted: str, keys: Collection[str], options: Mapping[str, str] | None = None) -> str:
    """Expand a short key: ``columns.text`` gives ``task_options.columns.text``, and so does
    ``text_column``.

    ``keys`` are those at the top of a config. ``options`` are those of the task by short name;
    ``None``: any name that no flag of the command line has may be one.
    """
    first, dot, below = dotted.partition(".")
    if first in keys:
        return dotted
    if options is not None and first in options:
        return f"{OPTIONS}.{options[first]}{dot}{below}"
    if first in OF_FLAGS:
        return f"{OF_FLAGS[first]}{dot}{below}"
    return f"{OPTIONS}.{dotted}" if options is None else dotted


def with_full_keys(
    tree: Mapping[str, Any], keys: Collection[str], task: str | None = None, source: str = "config"
) -> dict[str, Any]:
    """Return ``tree`` with each short key at its full place: options of its task, or of ``task``,
    below ``task_options``, and values alone in their groups.

    ``keys`` are the top-level keys of a config. Unknown keys stay in place. Raises ConfigError,
    which names ``source``, if a value is given in both places.
    """
    full = dict(tree)
    for group, value in tree.items():
        if group in NAME_ALONE and isinstance(value, str):
            full[group] = {NAME_ALONE[group]: value}
        elif group in NUMBER_ALONE and isinstance(value, int | float | None):
            full[group] = {NUMBER_ALONE[group]: value}
    others = [key for key in tree if key not in keys and isinstance(key, str)]
    if not others:
        return full
    options = option_names(task or str(tree.get("task", "auto")))
    for short in others:
        dotted = full_key(short, keys, options)
        if dotted != short:
            _move(full, short, dotted, source)
    return full


def _move(tree: dict[str, Any], short: str, dotted: str, source: str) -> None:
    """Move the value of a short key to its ``dotted`` key, in place; the mappings on the way there
    are copied.
    """
    value = tree.pop(short)
    *groups, leaf = dotted.split(".")
    branch = tree
    for group in groups:
        below = branch.get(group)
        is_free = below is None or isinstance(below, Mapping)
        if not is_free:
            break
        branch[group] = branch = dict(below or {})
    else:
        is_free = leaf not in branch
        if not is_free and isinstance(value, Mapping) and isinstance(branch[leaf], Mapping):
            # Some keys of a group here, and others there.
            is_free = not value.keys() & branch[leaf].keys()
            value = {**branch[leaf], **value}
    if not is_free:
        raise ConfigError(
            f"{source}: {short!r} is short for {dotted!r}, which is set too; keep one"
        )
    branch[leaf] = value

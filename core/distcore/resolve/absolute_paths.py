"""Absolute paths in the recorded config of a run, valid from any folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from distcore.config import RunConfig, with_changes
from distcore.files import absolute
from distcore.resolve.resolve import Resolved


def with_absolute_paths(resolved: Resolved) -> RunConfig:
    """Return the config of a resolved run with the paths of task, strategy, optimizer, schedule
    and extensions absolute.

    The path of a missing file stays as it is.
    """
    config = resolved.config
    return with_changes(
        config,
        {
            "task": absolute(config.task),
            "task_options": _absolute_options(config.task_options, resolved.task.task),
            "strategy_options": _absolute_options(config.strategy_options, resolved.strategy),
            "optimizer.name": absolute(config.optimizer.name),
            "schedule.name": absolute(config.schedule.name),
            "extensions": {absolute(name): given for name, given in config.extensions.items()},
        },
    )


def path_options_of(plugin: object) -> Collection[str]:
    """Return the options of a task or a strategy that name a file or a folder.

    They are the fields of type ``Path``, and those in its attribute ``path_options``.
    """
    names = set(getattr(plugin, "path_options", ()))
    if dataclasses.is_dataclass(plugin):
        for field in dataclasses.fields(plugin):
            if isinstance(getattr(plugin, field.name), Path):
                names.add(field.name)
    return names


def _absolute_options(options: Mapping[str, Any], plugin: object) -> dict[str, Any]:
    """Return ``options`` with absolute paths in those that name files or folders."""
    path_options = path_options_of(plugin)
    absolute_options = dict(options)
    for name, value in options.items():
        if name in path_options:
            absolute_options[name] = _absolute(value)
    return absolute_options


def _absolute(value: Any) -> Any:
    """Return a path made absolute; of several by name, each. Other values stay as they are."""
    if isinstance(value, Mapping):
        return {name: _absolute(path) for name, path in value.items()}
    return absolute(value) if isinstance(value, str) else value

"""Check the options of a run that streams its rows."""

from __future__ import annotations

from distcore import ConfigError
from distcore_tasks.shared.options import TaskOptions


def check_stream(options: TaskOptions, why_not: dict[str, str | bool]) -> None:
    """Raise ConfigError for options that a stream cannot have. ``why_not``: the problem of
    each, if it is set.
    """
    embedded = (
        options.data in options.embedded and f"{options.data} comes with distcore and is no file"
    )
    for key, problem in {"data": embedded, **why_not}.items():
        if problem:
            raise ConfigError(f"task_options.stream = true, {key}: {problem}")

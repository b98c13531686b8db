"""Build the task of a config. No other module does."""

from __future__ import annotations

from typing import Any

from distcore import registry
from distcore.config import GIVEN, RunConfig
from distcore.errors import ConfigError, StrategyError
from distcore.plugin.options import build, values_of
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Task


def load_task(config: RunConfig, name: str | None = None) -> BoundTask:
    """Import the task that the config names, or ``name`` instead, and build it from its options.

    Raises StrategyError, one line.
    """
    check_name(config.task, name)
    name = task_name(name or config.task)
    if name.startswith(GIVEN):
        raise StrategyError(
            f"task {name!r}: was given to train() as an object, which cannot be built again; name"
            " it with --task file.py:Class, or by an entry point"
        )
    task: Task = build("task", name, registry.load("tasks", name), config.task_options)
    return BoundTask.wrap(task)


def check_name(trained: str, name: str | None) -> None:
    """Raise ConfigError if ``name`` cannot be the task of a run that was trained with ``trained``.

    It can be one that was given as an object, or a file that has been moved.
    """
    was_object = trained.startswith(GIVEN)
    are_files = name is not None and ".py:" in name and ".py:" in trained
    if name and name != trained and not was_object and not are_files:
        raise ConfigError(f"--task {name}: the run is of task {trained!r}")


def task_name(configured: str) -> str:
    """Return the name of a config's task; raises StrategyError for ``auto`` if
    there is no default one.
    """
    return registry.default_task() if configured == "auto" else configured


def recorded(config: RunConfig, bound: BoundTask, is_given: bool) -> dict[str, Any]:
    """Return the task's part of a recorded config: all options, and a name if the task was
    given as an object.
    """
    task = bound.task
    if not is_given:
        return {"task": task_name(config.task), "task_options": values_of(task)}
    try:
        name = _name_of(task, config.task)
        options = values_of(task)
    except TypeError:
        # A field has no form in a config file, so no name could build the task again.
        name = _as_given(task)
        options = {}
    if config.task_options and config.task_options != options:
        option = next(iter(config.task_options))
        raise ConfigError(
            f"task_options.{option}: train() was given a task, which has its options already"
        )
    return {"task": name, "task_options": options}


def _name_of(task: Task, configured: str) -> str:
    """Return the name under which a config records a task object; raises ConfigError if the config
    names another task.
    """
    cls = type(task)
    if configured.startswith(GIVEN):
        return configured
    if configured != "auto":
        named = registry.load("tasks", configured)
        # By name: the class of a script is in __main__, and imported by its path it is another one.
        if named.__name__ != cls.__name__:
            raise ConfigError(
                f"task = {configured!r}: is {named.__name__}, but train() was given {cls.__name__}"
            )
        return configured
    target = f"{cls.__module__}:{cls.__qualname__}"
    for name, entry in registry.entries("tasks").items():
        if entry.value == target:
            return name
    return _as_given(task)


def _as_given(task: Task) -> str:
    """Return the name of a task that was given as an object, and cannot be built by its name."""
    # Without the module: a class of a script is in __main__, and elsewhere in a module with the
    # script's name.
    return f"{GIVEN}{type(task).__qualname__}"

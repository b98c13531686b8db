"""Describe the installed tasks: where they come from, what they measure, and their options. Imports no torch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

from rich.console import Console
from rich.table import Table

from distcore.errors import DistcoreError
from distcore.plugin import registry
from distcore.plugin.options import Option, options_of
from distcore.plugin.task import declared_metrics
from distcore.tables import headed_table, stdout_console

Description = dict[str, Any]
"""A task as JSON values."""
FILE_WIDTH = 120
"""Characters per line where stdout is not a terminal."""
ARROWS = {"min": "↓", "max": "↑"}


def describe_all() -> list[Description]:
    """Describe every task that is installed and not blocked."""
    return [describe(name, offered) for name, offered in registry.offers("tasks").items()]


def describe(name: str, offered: Sequence[EntryPoint]) -> Description:
    """Describe one task, or say in ``reason`` why it cannot be used. ``offered``: its entry points."""
    facts: Description = {
        "name": name,
        "distribution": " and ".join(registry.distribution(entry) for entry in offered),
        "importable": True,
        "reason": None,
        "about": "",
        "metrics": {},
        "options": [],
    }
    try:
        cls = registry.load("tasks", name)
        metrics = dict(declared_metrics(cls))
    except DistcoreError as error:
        return facts | {"importable": False, "reason": str(error)}
    options = [dataclasses.asdict(option) for option in options_of(cls)]
    return facts | {"about": _about(cls), "metrics": metrics, "options": options}


def show(found: list[Description]) -> None:
    """Print a table of the tasks, then the options of each."""
    console = stdout_console(FILE_WIDTH)
    table = headed_table("task", "distribution", "metrics", "about")
    for facts in found:
        if facts["importable"]:
            table.add_row(facts["name"], facts["distribution"], _metrics(facts["metrics"]), facts["about"])
    console.print(table)
    for facts in found:
        if not facts["importable"]:
            console.print(f"{facts['name']}: cannot be used: {facts['reason']}", markup=False, soft_wrap=True)
        elif facts["options"]:
            console.print(_options(facts["name"], [Option(**option) for option in facts["options"]]))
    console.print("Set an option with --set task_options.NAME=VALUE.", markup=False)


def help_of(name: str) -> str:
    """Return what ``distcore train --task NAME --help`` says of the task; raises DistcoreError if there is none."""
    cls = registry.load("tasks", name)
    console = Console(width=FILE_WIDTH, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(f"task {name}: {_about(cls)}", markup=False)
        console.print(
            f"metrics: {_metrics(declared_metrics(cls))}; the best of one is kept with --set checkpoints.best=NAME"
        )
        console.print("set an option with --set task_options.NAME=VALUE:", markup=False)
        console.print(_options(name, options_of(cls)))
    return captured.get()


def _about(cls: type[object]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0].replace("``", "").partition(";")[0].rstrip(".")


def _metrics(metrics: dict[str, Any]) -> str:
    return " ".join(f"{name} {ARROWS[direction]}" for name, direction in metrics.items()) or "none"


def _options(name: str, options: Sequence[Option]) -> Table:
    table = headed_table(f"{name}: option", "type", "default", "meaning")
    for option in options:
        table.add_row(option.name, option.type, option.default or "required", option.doc)
    return table

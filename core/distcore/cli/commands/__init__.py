"""The commands: those of the core, and those of other distributions in
the entry-point group ``distcore.commands``.

A command is a module with ``SUMMARY``, its line in ``distcore --help``, ``add_arguments(parser)``
and ``run(arguments)``, which returns the exit code. A module is imported when its command runs; for
the help its summary is read from the source.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from distcore import registry
from distcore.errors import ConfigError
from distcore.hints import how_to_get, nearest

OWN = ("train", "eval", "predict", "strategies", "tasks", "check", "checkpoint")
"""The commands of the core, as the help lists them."""
_SUMMARY = re.compile(r'^SUMMARY = "(.*)"$', re.M)


def command_module(name: str) -> Any:
    """Import the module of a command; raises DistcoreError, which says how to get it,
    if there is none.
    """
    if name in OWN:
        return import_module(f"distcore.cli.commands.{name}")
    installed = registry.offers("commands")
    # Blocked ones, too: ``load`` says that they are.
    if any(entry.name == name for entry in registry.all_offers("commands")):
        return registry.load("commands", name)
    if how := how_to_get("commands", name):
        raise ConfigError(f"command {name!r} is not installed; get it with: {how}")
    known = [*OWN, *installed]
    # A longer word may be too far from its command for ``nearest``: "evaluate" from "eval".
    begun = next(filter(name.startswith, known), name)
    hint = nearest(begun, known)
    raise ConfigError(f"no command named {name!r}{hint} (commands: {', '.join(known)})")


def summaries() -> dict[str, str]:
    """Return the line of help of each command that is installed, by name. Imports no command."""
    lines = {name: _summary(f"distcore.cli.commands.{name}") for name in OWN}
    for name, (entry, *_) in registry.offers("commands").items():
        if name not in lines:
            lines[name] = _summary(entry.value)
    return lines


def _summary(module: str) -> str:
    """Return the first sentence about a module; empty if it cannot be found. Runs no code of it
    or of its packages.
    """
    places: list[str] | None = None
    spec: ModuleSpec | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = next(
            filter(None, (finder.find_spec(name, places) for finder in sys.meta_path)), None
        )
        if spec is None:
            return ""
        places = list(spec.submodule_search_locations or ())
    match = (
        _SUMMARY.search(Path(spec.origin).read_text(encoding="utf-8"))
        if spec and spec.origin
        else None
    )
    return match[1] if match else ""

"""What ``distcore strategies`` and ``distcore tasks`` share: describe what is installed, and print it as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from typing import Any

from rich.console import Console

from distcore import registry
from distcore.errors import DistcoreError
from distcore.plugin.options import options_of
from distcore.tables import print_described, say, stdout_console

Description = dict[str, Any]
"""A plugin as JSON values."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """One kind of plugin, and how it is described."""

    group: str
    """The group of its entry points: ``strategies`` or ``tasks``."""
    unknown: Description
    """What is said of a plugin that cannot be used, in place of ``facts``."""
    facts: Callable[[str, Any], Description]
    """Returns what is particular to this kind, from a plugin's name and its class; raises DistcoreError."""
    cells: Callable[[Description], dict[str, str]]
    """Returns the columns of the overview that follow name and distribution, by heading."""
    remarks: Callable[[Description], Sequence[str]]
    """Returns lines that follow the overview."""
    table: Callable[[Console, Sequence[str], Sequence[Sequence[str]]], None]
    """Prints the overview."""

    @property
    def kind(self) -> str:
        """One plugin of this kind, in a word."""
        return registry.KINDS[self.group]


def described(catalogue: Catalogue, name: str | None = None) -> list[Description]:
    """Describe every plugin that is installed and not blocked; one that cannot be used says why in ``reason``.

    With ``name`` (also ``file.py:Class``) describe this one only; raises StrategyError if it cannot be used.
    """
    offers = registry.offers(catalogue.group)
    if name is not None:
        return [_description(catalogue, name, offers.get(name, []))]
    return [_description_or_reason(catalogue, name, offered) for name, offered in offers.items()]


def show(catalogue: Catalogue, found: Sequence[Description]) -> None:
    """Print an overview, then the remarks on each plugin and a table of its options."""
    console = stdout_console()
    usable = [facts for facts in found if facts["importable"]]
    if usable:
        cells = [_cells(catalogue, facts) for facts in usable]
        catalogue.table(console, list(cells[0]), [list(row.values()) for row in cells])
    for facts in found:
        _show_details(console, catalogue, facts)
    say(console, how_to_set(catalogue))


def show_one(catalogue: Catalogue, facts: Description) -> None:
    """Print one plugin: a line for each of its facts, the remarks on it, and a table of its options."""
    console = stdout_console()
    name, *rest = _cells(catalogue, facts).items()
    print_described(console, name, rest)
    _show_details(console, catalogue, facts)
    say(console, how_to_set(catalogue))


def show_options(console: Console, catalogue: Catalogue, facts: Description) -> None:
    """Print a table of the plugin's options."""
    rows = [
        (option["name"], option["type"], option["default"] or "required", option["doc"] + _short_form(facts, option))
        for option in facts["options"]
    ]
    print_described(console, (f"{facts['name']}: option", "type", "default", "meaning"), rows)


def how_to_set(catalogue: Catalogue) -> str:
    """Return a line that says how an option of this kind of plugin is set."""
    return f"Set an option with --set {catalogue.kind}_options.NAME=VALUE."


def _description_or_reason(catalogue: Catalogue, name: str, offered: list[EntryPoint]) -> Description:
    try:
        return _description(catalogue, name, offered)
    except DistcoreError as error:
        reason = " ".join(str(error).split())
        return _common(name, offered) | catalogue.unknown | {"importable": False, "reason": reason, "options": []}


def _description(catalogue: Catalogue, name: str, offered: list[EntryPoint]) -> Description:
    cls = registry.load(catalogue.group, name)
    options = [dataclasses.asdict(option) for option in options_of(cls)]
    return _common(name, offered) | catalogue.facts(name, cls) | {"options": options}


def _common(name: str, offered: list[EntryPoint]) -> Description:
    origin = " and ".join(registry.distribution(entry) for entry in offered) or name.partition(":")[0]
    return {"name": name, "distribution": origin, "importable": True, "reason": None}


def _cells(catalogue: Catalogue, facts: Description) -> dict[str, str]:
    return {catalogue.kind: facts["name"], "distribution": facts["distribution"], **catalogue.cells(facts)}


def _show_details(console: Console, catalogue: Catalogue, facts: Description) -> None:
    if not facts["importable"]:
        say(console, f"{facts['name']}: cannot be used: {facts['reason']}")
        return
    for remark in catalogue.remarks(facts):
        say(console, f"{facts['name']}: {remark}")
    if facts["options"]:
        show_options(console, catalogue, facts)


def _short_form(facts: Description, option: Description) -> str:
    return f" Short form: {facts['name']}:VALUE." if option["name"] == facts.get("shorthand") else ""

"""Describe the installed strategies: whether they can be imported, what they declare, and their options."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint
from typing import Any

from rich.table import Table

from distcore.errors import StrategyError
from distcore.plugin import registry
from distcore.plugin.hooks import capabilities_of
from distcore.plugin.options import build, options_of
from distcore.plugin.shorthand import shorthand_of
from distcore.tables import headed_table, stdout_console

Description = dict[str, Any]
"""A strategy as JSON values."""
FILE_WIDTH = 120
"""Characters per line where stdout is not a terminal."""


def describe_all() -> list[Description]:
    """Describe every strategy that is installed and not blocked."""
    return [describe(name, offered) for name, offered in registry.offers("strategies").items()]


def describe(name: str, offered: list[EntryPoint]) -> Description:
    """Describe one strategy, or say in ``reason`` why it cannot be used. ``offered``: its entry points."""
    facts: Description = {
        "name": name,
        "distribution": " and ".join(registry.distribution(entry) for entry in offered),
        "importable": True,
        "reason": None,
        "shorthand": None,
        "declares": None,
        "options": [],
    }
    try:
        registry.only("strategies", offered)
        cls = registry.load("strategies", name)
        declared = capabilities_of(name, build("strategy", name, cls, {}))
        short = shorthand_of(name, cls)
    except StrategyError as error:
        return facts | {"importable": False, "reason": " ".join(str(error).split())}
    options = [dataclasses.asdict(option) for option in options_of(cls)]
    declares = _json(dataclasses.asdict(declared))
    return facts | {"declares": declares, "options": options, "shorthand": short}


def show(found: list[Description]) -> None:
    """Print a table of the strategies, then one table of options per strategy that has any."""
    console = stdout_console(FILE_WIDTH)
    console.print(_overview([facts for facts in found if facts["importable"]]))
    for facts in found:
        if not facts["importable"]:
            console.print(f"{facts['name']}: cannot be used: {facts['reason']}", markup=False, soft_wrap=True)
            continue
        for limit in facts["declares"]["limits"]:
            console.print(f"{facts['name']}: limit: {limit}", markup=False, soft_wrap=True)
        if facts["options"]:
            console.print(_options(facts))


def _overview(found: list[Description]) -> Table:
    headings = ("strategy", "distribution", "ranks", "devices", "precision", "shards", "gradients", "owns")
    table = headed_table(*headings)
    for facts in found:
        declared = facts["declares"]
        cells = [declared["processes"], " ".join(declared["devices"]), " ".join(declared["precisions"])]
        shards = "yes" if declared["shards_parameters"] else "no"
        owns = " ".join(declared["owns"]) or "-"
        table.add_row(facts["name"], facts["distribution"], *cells, shards, declared["gradients"], owns)
    return table


def _options(facts: Description) -> Table:
    table = headed_table(f"{facts['name']}: option", "type", "default", "meaning")
    for option in facts["options"]:
        short = f" Short form: {facts['name']}:VALUE." if option["name"] == facts["shorthand"] else ""
        table.add_row(option["name"], option["type"], option["default"] or "required", f"{option['doc']}{short}")
    return table


def _json(declared: dict[str, Any]) -> dict[str, Any]:
    return {key: sorted(value) if isinstance(value, frozenset) else value for key, value in declared.items()}

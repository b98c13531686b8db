"""Descriptions of installed plugins, as tables or as JSON, for ``distcore
strategies`` and ``distcore tasks``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar

from distcore.errors import DistcoreError
from distcore.plugin.options import options_of
from distcore.registry import distribution, load, offers

if TYPE_CHECKING:
    from rich.console import Console

Description = dict[str, Any]
"""A plugin as JSON values."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show the options of this one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


class PluginsTable:
    """One kind of plugin; a command describes its kind by a subclass."""

    group: ClassVar[str]
    """The group of the entry points: ``strategies`` or ``tasks``."""
    kind: ClassVar[str]
    """The group's plugins, in words."""
    by_name_alone: ClassVar[Collection[str]] = ("distribution",)
    """Columns that only the table of one plugin has."""
    unusable: ClassVar[Description]
    """Stands for ``facts`` of a plugin that cannot be used."""

    def facts(self, name: str, cls: type[object]) -> Description:
        """Return the facts that only this kind of plugin has; raises DistcoreError."""
        raise NotImplementedError

    def cells(self, facts: Description) -> dict[str, str]:
        """Return the columns of the overview after name and distribution, by heading."""
        raise NotImplementedError

    def remarks(self, facts: Description) -> Sequence[str]:
        """Return lines to print below the table of one plugin."""
        return ()

    def print_overview(
        self, console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]
    ) -> None:
        """Print one row per plugin."""
        from distcore.cli.tables import print_cells

        print_cells(console, headings, rows)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print every plugin, or the one that is named, and return 0; raises DistcoreError if
        that cannot be used.
        """
        from distcore.cli.tables import stdout_console

        installed = offers(self.group)
        if (name := arguments.name) is None:
            plugins = [
                self._description_or_reason(name, offered) for name, offered in installed.items()
            ]
        else:
            plugins = [self._description(name, installed.get(name, []))]
        if arguments.json:
            print(json.dumps(plugins, indent=1))
        else:
            self._show(stdout_console(), plugins, overview=name is None)
        return 0

    def _show(self, console: Console, plugins: Sequence[Description], *, overview: bool) -> None:
        """Print an overview of ``plugins``, or everything about the only one."""
        from distcore.cli.tables import print_described, say

        if not overview:
            (facts,) = plugins
            heading, *facts_of_one = self._cells(facts).items()
            print_described(console, heading, facts_of_one)
            self._show_details(console, facts)
            say(console, f"Set an option with --set {self.kind}_options.NAME=VALUE.")
            return
        rows = [self._cells(facts) for facts in plugins if facts["importable"]]
        if rows:
            shown = [name for name in rows[0] if name not in self.by_name_alone]
            cells = [[row[name] for name in shown] for row in rows]
            self.print_overview(console, shown, cells)
        for facts in plugins:
            if not facts["importable"]:
                say(console, f"{facts['name']}: cannot be used: {facts['reason']}")
        say(console, f"distcore {self.group} NAME shows the options of one.")

    def _show_details(self, console: Console, facts: Description) -> None:
        """Print remarks about a plugin, and a table of its options."""
        from distcore.cli.tables import print_described, say

        for remark in self.remarks(facts):
            say(console, f"{facts['name']}: {remark}")
        rows = []
        for option in facts["options"]:
            meaning = option["doc"]
            if option["name"] == facts.get("shorthand"):
                meaning += f" Short form: {facts['name']}:VALUE."
            default = option["default"] or "required"
            rows.append((option["name"], option["type"], default, meaning))
        if rows:
            headings = (f"{facts['name']}: option", "type", "default", "meaning")
            print_described(console, headings, rows)

    def _description_or_reason(self, name: str, offered: list[EntryPoint]) -> Description:
        """Return the facts about a plugin, or why it cannot be used: a table goes on without it."""
        try:
            return self._description(name, offered)
        except DistcoreError as error:
            reason = " ".join(str(error).split())
            failure = {"importable": False, "reason": reason, "options": []}
            return _common(name, offered) | self.unusable | failure

    def _description(self, name: str, offered: list[EntryPoint]) -> Description:
        """Import a plugin; return the facts about it, its options among them."""
        cls = load(self.group, name)
        options = [asdict(option) for option in options_of(cls)]
        return _common(name, offered) | self.facts(name, cls) | {"options": options}

    def _cells(self, facts: Description) -> dict[str, str]:
        return {
            self.kind: facts["name"],
            "distribution": facts["distribution"],
            **self.cells(facts),
        }


def _common(name: str, offered: list[EntryPoint]) -> Description:
    """Return the facts of every kind of plugin; one of a file has no entry points."""
    file, *_ = name.partition(":")
    origin = " and ".join(distribution(entry) for entry in offered) or file
    return {"name": name, "distribution": origin, "importable": True, "reason": None}

"""``distcore strategies``: list the installed strategies with their capabilities, or
show one strategy's options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import ClassVar

from distcore.cli.plugins_table import Description, PluginsTable
from distcore.cli.plugins_table import add_arguments as add_arguments

SUMMARY = "list the installed strategies, or the options of one"


class StrategiesTable(PluginsTable):
    """The declarations of each strategy."""

    group, kind = "strategies", "strategy"
    by_name_alone = ("distribution", "gradients")
    unusable: ClassVar[Description] = {"shorthand": None, "declares": None}

    def facts(self, name: str, cls: type[object]) -> Description:
        """Return the declared capabilities, and the option that has a short form."""
        from distcore.plugin.strategy.argument import shorthand_of
        from distcore.resolve import strategies

        declared = asdict(strategies.load(name, {}).capabilities)
        as_json = {
            key: sorted(value) if isinstance(value, frozenset) else value
            for key, value in declared.items()
        }
        return {"shorthand": shorthand_of(name, cls), "declares": as_json}

    def cells(self, facts: Description) -> dict[str, str]:
        """Return a column for each capability of interest."""
        declared = facts["declares"]
        return {
            "ranks": declared["processes"],
            "devices": " ".join(declared["devices"] or ["any"]),
            "precision": " ".join(declared["precisions"]),
            "shards": "yes" if declared["shards_parameters"] else "no",
            "gradients": declared["gradients"],
            "owns": " ".join(declared["owns"]) or "-",
        }

    def remarks(self, facts: Description) -> Sequence[str]:
        """Return the limits."""
        return [f"limit: {limit}" for limit in facts["declares"]["limits"]]


run = StrategiesTable().run

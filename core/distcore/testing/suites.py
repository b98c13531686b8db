"""The suites that are there, by the kind of plugin that each measures: the core's own, and
those that are installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from distcore.deprecation import deprecated
from distcore.registry import load, offers

if TYPE_CHECKING:
    from distcore.testing.suite import Suite

OWN = {
    "strategy": ("distcore.testing.strategy_suite", "STRATEGIES"),
    "task": ("distcore.testing.task_suite", "TASKS"),
}
"""Module and name of the core's own; importing one imports torch."""


def kinds() -> list[str]:
    """Return the kinds of plugins that have a suite, each once. Imports none."""
    kinds_of_groups = [*OWN, *offers("suites"), *offers("kits")]
    return list(dict.fromkeys(kinds_of_groups))


def suite_of(kind: str) -> Suite:
    """Return the suite of a kind; raises StrategyError if none is installed for it."""
    if kind in OWN:
        module, name = OWN[kind]
        own: Suite = getattr(import_module(module), name)
        return own
    group = "suites"
    if kind not in offers(group) and kind in offers("kits"):
        deprecated(f"entry-point group 'distcore.kits', of {kind!r},", "0.2", "'distcore.suites'")
        group = "kits"
    installed: Suite = load(group, kind)
    return installed

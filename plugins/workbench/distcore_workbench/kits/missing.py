"""A run without the packages of a plugin's extras, in an interpreter of its own that
does not see them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from distcore import DistcoreError, load_config, train
from distcore.registry import offers
from distcore_workbench.kits.points import Points


def packages_of_extras(group: str, name: str) -> list[str]:
    """Return the top-level modules that only the extras of the plugin's distribution bring,
    as far as installed.
    """
    entry, *_ = offers(group).get(name, [None])
    lines = (entry.dist.requires if entry and entry.dist else None) or []
    needs = {False: set[str](), True: set[str]()}
    for line in lines:
        needs["extra ==" in line].add(re.split(r"[^\w.-]", line, maxsplit=1)[0].lower())
    only = needs[True] - needs[False]
    brought = {
        module: {owner.lower() for owner in owners}
        for module, owners in packages_distributions().items()
    }
    return sorted(
        module for module, owners in brought.items() if owners & only and module.isidentifier()
    )


def train_without(packages: Sequence[str], config: Path) -> str:
    """Train by a config file without these modules; return what is wrong with how
    that ended, or nothing.
    """
    command = [sys.executable, "-m", __name__, str(config), *packages]
    done = subprocess.run(command, cwd=config.parent, capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines() or [""]
    return "" if done.returncode in (0, 2) else f"{said[-1]} (exit status {done.returncode})"


class Without:
    """A finder of modules that does not see some of them; it finds distributions, and
    all else, as before.
    """

    def __init__(self, finder: Any, hidden: Sequence[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return what the finder finds, unless it is hidden."""
        return (
            None
            if name.partition(".")[0] in self._hidden
            else self._finder.find_spec(name, path, target)
        )


if __name__ == "__main__":
    _, file, *hidden_modules = sys.argv
    sys.meta_path[:] = [Without(finder, hidden_modules) for finder in sys.meta_path]
    try:
        train(load_config(file, {}), Points())
    except DistcoreError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)

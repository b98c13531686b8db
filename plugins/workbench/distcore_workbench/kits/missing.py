"""Train without the packages of a plugin's extras, in an interpreter that does not see them."""

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
    """Return the top-level modules that only the extras of the plugin's distribution bring.

    Modules that are not installed are left out.
    """
    entry, *_ = offers(group).get(name, [None])
    requirements = (entry.dist.requires if entry and entry.dist else None) or []
    always_required: set[str] = set()
    required_by_extras: set[str] = set()
    for requirement in requirements:
        distribution = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
        if "extra ==" in requirement:
            required_by_extras.add(distribution)
        else:
            always_required.add(distribution)
    only_by_extras = required_by_extras - always_required
    modules = []
    for module, distributions in packages_distributions().items():
        is_of_extras = not only_by_extras.isdisjoint(map(str.lower, distributions))
        if is_of_extras and module.isidentifier():
            modules.append(module)
    return sorted(modules)


def train_without(packages: Sequence[str], config: Path) -> str:
    """Train by a config file without these modules; return the fault, or an empty text.

    A run that trains is right, and so is one that ends with an error for the user, exit status 2.
    """
    command = [sys.executable, "-m", __name__, str(config), *packages]
    run = subprocess.run(command, cwd=config.parent, capture_output=True, text=True, check=False)
    if run.returncode in (0, 2):
        return ""
    last_line = (run.stderr.strip().splitlines() or [""])[-1]
    return f"{last_line} (exit status {run.returncode})"


class Without:
    """A finder of modules that does not see some of them.

    It finds distributions, and all else, as before.
    """

    def __init__(self, finder: Any, hidden: Sequence[str]) -> None:
        self._finder = finder
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return what the finder finds, unless it is hidden."""
        if name.partition(".")[0] in self._hidden:
            return None
        spec: ModuleSpec | None = self._finder.find_spec(name, path, target)
        return spec


if __name__ == "__main__":
    _, file, *hidden_modules = sys.argv
    sys.meta_path[:] = [Without(finder, hidden_modules) for finder in sys.meta_path]
    try:
        train(load_config(file, {}), Points())
    except DistcoreError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)

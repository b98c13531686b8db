"""What a strategy imports: one step of training in a fresh process, which prints the modules that belong to others."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from distcore.config import RunConfig
from distcore.launchers import launch
from distcore.plugin import registry


def main(text: str) -> None:
    """Print, as JSON, the foreign modules of a run with the config ``text``."""
    config = RunConfig.model_validate_json(text).model_copy(update={"nproc": 1})
    with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
        modules = launch(_after_a_step, config, Path(folder), nproc=1, timeout=50)[0]
    print(json.dumps(sorted(set(modules) & foreign(config.strategy))))


def foreign(strategy: str) -> set[str]:
    """Modules that only other strategies have a use for, by what their distributions say of themselves.

    What the strategy's own distribution requires for an extra, such as one of its backends, is its own, too. A
    distribution may also offer a launcher, which every run asks, so that its package by itself is not foreign.
    """
    entries = registry.entries("strategies")
    own = entries.pop(strategy)
    theirs = _needs([requirement for entry in entries.values() for requirement in _requirements(entry.dist)])
    theirs -= _needs(["distcore", *_requirements(own.dist, extras=True)])
    required = {module for module, owners in packages_distributions().items() if theirs & set(map(_normal, owners))}
    return {entry.module for entry in entries.values()} - {own.module} | required


def _after_a_step(config: RunConfig, folder: Path) -> list[str]:
    from distcore.testing.problem import Problem
    from distcore.testing.rank import Subject, lab_of

    with lab_of(Subject(config=config, cases=()), folder) as lab:
        lab.job(Problem()).train(1)
    return list(sys.modules)


def _needs(names: list[str]) -> set[str]:
    """These distributions and all that they require, directly or not, as far as it is installed."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            with suppress(PackageNotFoundError):
                names += _requirements(distribution(name))
    return found


def _requirements(found: Distribution | None, extras: bool = False) -> list[str]:
    """Names of what a distribution requires, for its ``extras`` or without them."""
    needed = (line for line in (found.requires if found else None) or [] if extras or "extra ==" not in line)
    return [_normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in needed]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(sys.argv[1])

"""What a strategy imports: one step of training in a fresh process, which prints the modules that belong to others."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from importlib.metadata import Distribution, EntryPoint, packages_distributions
from pathlib import Path

from distcore import registry
from distcore.config import RunConfig
from distcore.launch import launch


def main(text: str) -> None:
    """Print, as JSON, the foreign modules of a run with the config ``text``."""
    config = RunConfig.model_validate_json(text).model_copy(update={"nproc": 1})
    with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
        modules = launch(_after_a_step, config, Path(folder), nproc=1, timeout=50)[0]
    print(json.dumps(sorted(set(modules) & foreign(config.strategy))))


def foreign(strategy: str) -> set[str]:
    """Modules that only other strategies have a use for, by what their distributions say of themselves."""
    entries = registry.entries("strategies")
    own = entries.pop(strategy)
    mine = {own.module, _package(own), *_parents(own.module)}
    named = {name for entry in entries.values() for name in (entry.module, _package(entry))} - mine
    others = {entry.dist.name: entry.dist for entry in entries.values() if entry.dist}
    ours = _required(own.dist) | _required(Distribution.from_name("distcore"))
    theirs = set().union(*map(_required, others.values())) - ours - {"distcore"}
    required = {module for module, owners in packages_distributions().items() if theirs & set(map(_normal, owners))}
    return named - {"distcore"} | required


def _after_a_step(config: RunConfig, folder: Path) -> list[str]:
    from distcore.testing.lab import Lab
    from distcore.testing.problem import Problem
    from distcore.testing.rank import Subject, lab_of

    lab: Lab
    with lab_of(Subject(config=config, cases=()), folder) as lab:
        lab.job(Problem()).train(1)
    return list(sys.modules)


def _required(distribution: Distribution | None) -> set[str]:
    """Names of the distributions that ``distribution`` requires, those of its extras left out."""
    needed = (line for line in (distribution.requires if distribution else None) or [] if "extra ==" not in line)
    return {_normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in needed}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _package(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


if __name__ == "__main__":
    main(sys.argv[1])

"""Find the imports of a strategy: train one step in a process that has imported the core alone.

``python -m distcore.testing.fresh`` reads run configs, one JSON object per line, and answers each
with one line: the list of foreign modules, or the error as a string. One interpreter serves all
configs: it imports no strategy itself, and forks a process for each step.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from pathlib import Path

from distcore import registry
from distcore.config import RunConfig
from distcore.errors import DistcoreError
from distcore.launchers import launch
from distcore.launchers.processes.failures import one_line

LIMIT = 60.0
"""Seconds that one step may take, the start of its process included."""


def foreign_modules(configs: Sequence[RunConfig]) -> list[list[str] | str]:
    """Return for each config the modules of other strategies that a step imports, or an error line.

    A step runs on ``nproc`` ranks; the first one answers.
    """
    text = "".join(f"{config.model_dump_json()}\n" for config in configs)
    command = [sys.executable, "-m", "distcore.testing.fresh"]
    seconds = LIMIT * (1 + len(configs))
    try:
        answer = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"no answer within {seconds:g} s"] * len(configs)
    if answer.returncode:
        return [one_line(answer.stderr[-300:])] * len(configs)
    # Before the answers, imports may have printed lines of their own.
    answers = answer.stdout.splitlines()[-len(configs) :]
    return [json.loads(line) for line in answers]


def foreign(strategy: str) -> set[str]:
    """Return the modules that only other strategies use, by the metadata of their distributions.

    Requirements of the strategy's own extras, such as a backend, are not foreign. Nor is the
    package of a distribution with a launcher, because every run loads launchers.
    """
    others = registry.entries("strategies")
    own = others.pop(strategy)
    requirements_of_others: list[str] = []
    for entry in others.values():
        requirements_of_others += _requirements(entry.dist)
    own_requirements = ["distcore", *_requirements(own.dist, extras=True)]
    if own.dist:
        # Itself, too: the distribution of another strategy may require it.
        own_requirements.append(_normal(own.dist.name))
    foreign_distributions = _needs(requirements_of_others) - _needs(own_requirements)
    foreign_packages = set()
    for package, owners in packages_distributions().items():
        if foreign_distributions & set(map(_normal, owners)):
            foreign_packages.add(package)
    modules_of_others = {entry.module for entry in others.values()} - {own.module}
    return modules_of_others | foreign_packages


def _answer(config: RunConfig) -> list[str] | str:
    """Return the foreign modules that a step of ``config`` imports, sorted, or the error line."""
    ranks = int(config.nproc)
    with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
        try:
            modules, *_ = launch(_after_a_step, config, Path(folder), nproc=ranks, timeout=LIMIT)
        except DistcoreError as error:
            return one_line(str(error))
    return sorted(set(modules) & foreign(config.strategy))


def _after_a_step(config: RunConfig, folder: Path) -> list[str]:
    """Train one step in this rank; return the modules that the process has imported then."""
    from distcore.testing.problem import Problem
    from distcore.testing.rank import lab_of
    from distcore.testing.subject import Subject

    with lab_of(Subject(config=config, cases=()), folder) as lab:
        lab.job(Problem()).train(1)
    return list(sys.modules)


def _needs(names: list[str]) -> set[str]:
    """Return the distributions ``names`` and all that they require, directly or not."""
    needed: set[str] = set()
    open_names = list(names)
    while open_names:
        name = open_names.pop()
        if name not in needed:
            needed.add(name)
            with suppress(PackageNotFoundError):
                open_names += _requirements(distribution(name))
    return needed


def _requirements(package: Distribution | None, extras: bool = False) -> list[str]:
    """Return the names of the distributions that ``package`` requires; with ``extras``, of its
    extras, too.
    """
    lines = (package.requires if package else None) or []
    names = []
    for line in lines:
        if extras or "extra ==" not in line:
            name, *_ = re.split(r"[^\w.-]", line, maxsplit=1)
            names.append(_normal(name))
    return names


def _normal(name: str) -> str:
    """Return the name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    # A step needs it, and importing takes a second: once here, not in each forked process.
    import_module("torch._dynamo")
    for line in sys.stdin:
        print(json.dumps(_answer(RunConfig.model_validate_json(line))), flush=True)

"""Find the imports of a strategy: train one step in a process that has imported the core alone.

``python -m distcore.testing.fresh`` reads run configs, one JSON object per line, and answers each
with one line: the
list of foreign modules, or the error as a string. One interpreter serves all configs: it
imports no strategy itself, and forks a process for each step.
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
    return [json.loads(line) for line in answer.stdout.splitlines()[-len(configs) :]]


def foreign(strategy: str) -> set[str]:
    """Return the modules that only other strategies use, by the metadata of their distributions.

    Requirements of the strategy's own extras, such as a backend, are not foreign. Nor is the
    package of a distribution with a launcher, because every run loads launchers.
    """
    entries = registry.entries("strategies")
    own = entries.pop(strategy)
    theirs = _needs(
        [requirement for entry in entries.values() for requirement in _requirements(entry.dist)]
    )
    itself = [_normal(own.dist.name)] if own.dist else []  # another plugin may require it
    theirs -= _needs(["distcore", *itself, *_requirements(own.dist, extras=True)])
    required = {
        module
        for module, owners in packages_distributions().items()
        if theirs & set(map(_normal, owners))
    }
    return {entry.module for entry in entries.values()} - {own.module} | required


def _answer(config: RunConfig) -> list[str] | str:
    with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
        try:
            modules = launch(
                _after_a_step, config, Path(folder), nproc=int(config.nproc), timeout=LIMIT
            )[0]
        except DistcoreError as error:
            return one_line(str(error))
    return sorted(set(modules) & foreign(config.strategy))


def _after_a_step(config: RunConfig, folder: Path) -> list[str]:
    from distcore.testing.problem import Problem
    from distcore.testing.rank import lab_of
    from distcore.testing.subject import Subject

    with lab_of(Subject(config=config, cases=()), folder) as lab:
        lab.job(Problem()).train(1)
    return list(sys.modules)


def _needs(names: list[str]) -> set[str]:
    needed: set[str] = set()
    while names:
        name = names.pop()
        if name not in needed:
            needed.add(name)
            with suppress(PackageNotFoundError):
                names += _requirements(distribution(name))
    return needed


def _requirements(package: Distribution | None, extras: bool = False) -> list[str]:
    needed = (
        line
        for line in (package.requires if package else None) or []
        if extras or "extra ==" not in line
    )
    return [_normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in needed]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    # a step needs it: once here, not in every process that is forked
    import_module("torch._dynamo")
    for line in sys.stdin:
        print(json.dumps(_answer(RunConfig.model_validate_json(line))), flush=True)

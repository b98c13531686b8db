"""The laboratory of a launcher's cases: requests, and the texts in its plans."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from distcore import ConfigError, nearest
from distcore.launchers import Here, Launcher, LaunchPlan, LaunchSpec
from distcore.registry import load

WORDS = (
    "--data",
    "two words.jsonl",
    "--set",
    "a=it's",
    "--model",
    '$HOME "quoted"',
    "--set",
    "b=*;c|d",
)
"""Arguments that a shell would change, unless they are quoted."""
VARIABLES = {"KIT_WORDS": "it's two words", "KIT_NUMBER": "7"}


@dataclass
class LauncherLab:
    """The launcher, and requests to it."""

    name: str
    """Of its entry point, or ``file.py:Class``."""
    settings: Mapping[str, Any]
    """Fields of the request."""
    folder: Path
    """The current folder of a launch."""

    @cached_property
    def launcher(self) -> Launcher:
        """A new launcher."""
        launcher: Launcher = load("launchers", self.name)()
        return launcher

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases that the launcher declares not to keep, with reasons."""
        declared: Mapping[str, str] = getattr(self.launcher, "exempt", {})
        return declared

    @cached_property
    def spec(self) -> LaunchSpec:
        """A request for two ranks with the fields of ``example``; raises ConfigError."""
        changes = {**getattr(self.launcher, "example", {}), **self.settings}
        names = [field.name for field in fields(LaunchSpec)]
        for name in changes:
            if name not in names:
                raise ConfigError(
                    f"{name}: no field of a request to a launcher{nearest(name, names)}"
                )
        here = Here(folder=str(self.folder), python=sys.executable, job="kit", environment={})
        out = str(self.folder / "run")
        plain = LaunchSpec(train=WORDS, nproc=2, here=here, device="cpu", out=out)
        return replace(plain, **changes)

    def plan(self, **changes: Any) -> LaunchPlan:
        """Return the plan of the request with some fields changed."""
        return self.launcher.plan(replace(self.spec, **changes))


def launcher_lab(name: str, settings: Mapping[str, Any], folder: Path) -> LauncherLab:
    """Return the lab of a launcher, by its name or as ``file.py:Class``; raises DistcoreError
    if it refuses to plan.
    """
    file, colon, cls = name.rpartition(":")
    lab = LauncherLab(f"{Path(file).absolute()}:{cls}" if colon else name, settings, folder)
    lab.plan()
    return lab


def texts_of(plan: LaunchPlan) -> Iterator[str]:
    """Yield every text in a plan: words, words of words that a shell takes apart,
    texts of YAML files.
    """
    for command in plan.commands:
        yield from _apart(command.words)
    for text in plan.files.values():
        with suppress(yaml.YAMLError):
            for document in yaml.safe_load_all(text):
                yield from _apart(_leaves(document))
        yield from _apart(text.splitlines())


def _apart(words: Iterable[str], depth: int = 3) -> Iterator[str]:
    for word in words:
        yield word
        inner: list[str] = []
        with suppress(ValueError):  # no shell would take it
            inner = shlex.split(word)
        if depth and inner != [word]:
            yield from _apart(inner, depth - 1)


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict | list):
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(inner)
    elif tree is not None:
        yield str(tree)

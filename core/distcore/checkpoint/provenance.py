"""The provenance of a trained model, for cards and trackers: task, data, training and versions."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distcore import registry
from distcore.checkpoint.reader import Checkpoint
from distcore.config import RunConfig
from distcore.plugin.report import Report
from distcore.plugin.strategy.contract import Run

PACKAGES = ("distcore-core", "torch", "transformers", "tokenizers")
"""Packages whose versions are recorded if they are installed, in addition to those of strategy and task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where the weights of a checkpoint come from. Paths are without their folders, which are nobody's business."""

    model: str
    """Class of the model."""
    task: str
    """Name of the task."""
    steps: int
    """Optimizer steps."""
    data: str
    """Source of the training data, from the task's options."""
    rows: str
    """How many rows that were, in words."""
    data_sha256: str
    """Of the training rows, as checkpoints have it."""
    strategy: str
    """Its name."""
    ranks: int
    """How many there were."""
    device: str
    """Their devices."""
    precision: str
    """Of the forward pass."""
    environment: str
    """Versions of the packages that trained the model, as text."""

    def facts(self) -> dict[str, str]:
        """Return all of it as texts by name."""
        return {name: str(getattr(self, name)) for name in self.__slots__}


def provenance(model: str, job_state: dict[str, Any], config: RunConfig, run: Path) -> Provenance:
    """Return the provenance of a checkpoint with this state and this config; ``run`` is the folder of its run.

    ``model`` is the name of the model's class.
    """
    # Checkpoints of earlier versions have none.
    versions = job_state.get("environment") or environment(config.strategy, config.task)
    return Provenance(
        model=model,
        task=without_folder(config.task),
        steps=job_state["progress"]["step"],
        data=without_folder(config.task_options.get("data", "of the task")),
        rows=_rows(run),
        data_sha256=str(job_state.get("data")),
        strategy=without_folder(config.strategy),
        ranks=int(config.nproc),
        device=config.device,
        precision=config.precision,
        environment=", ".join(f"{package} {number}" for package, number in versions.items()),
    )


def provenance_of(run: Run, checkpoint: Path) -> dict[str, str]:
    """Return the provenance of a checkpoint of a run as texts by name."""
    state, out = Checkpoint(checkpoint).job_state(), Path(str(run.config.out))
    return provenance(type(run.module).__name__, state, run.config, out).facts()


@cache  # it is asked for with every checkpoint
def environment(strategy: str, task: str) -> dict[str, str]:
    """Return the versions that a result depends on, by package.

    They are Python, the core, the task's distribution, and the strategy's distribution with its requirements.

    Packages without metadata, which run from their sources, are left out.
    """
    versions = {"python": platform.python_version()}
    for package in dict.fromkeys((*PACKAGES, *_behind(strategy), *_distributions("tasks", task))):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _behind(strategy: str) -> Iterator[str]:
    """Yield the distributions of a strategy, each followed by its requirements."""
    for entry in registry.offers("strategies").get(strategy, ()):
        if entry.dist is not None and entry.dist.name not in PACKAGES:
            yield entry.dist.name
            needs = [line for line in entry.dist.requires or () if "extra ==" not in line]
            yield from (re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needs)


def _distributions(group: str, name: str) -> Iterator[str]:
    """Yield the distributions of a plugin; none for a plugin from a file."""
    for entry in registry.offers(group).get(name, ()):
        if entry.dist is not None:
            yield entry.dist.name


def without_folder(value: object) -> str:
    """Return a name, or an absolute path's last part."""
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else str(value)


def _rows(run: Path) -> str:
    """Return how many rows the report counts; a run that was interrupted has none."""
    try:
        report: Report = json.loads((run / "report.json").read_text(encoding="utf-8"))
        return f"{report['data']['train']['rows']} rows"
    except (OSError, ValueError, KeyError, TypeError):
        return "number of rows not reported"

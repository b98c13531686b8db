"""The provenance of a trained model, for cards and trackers: task, data, training and versions."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
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
"""Packages whose versions are recorded if installed, in addition to strategy's and task's."""


def provenance(
    model: str, job_state: dict[str, Any], config: RunConfig, run: Path
) -> dict[str, str]:
    """Return, as texts by name, where the weights of a checkpoint come from.

    ``model`` is the name of the model's class, ``run`` the folder of its run. Paths are without
    their folders, which are nobody's business.
    """
    # Checkpoints of earlier versions have none.
    versions = job_state.get("environment") or environment(config.strategy, config.task)
    return {
        "model": model,
        "task": without_folder(config.task),
        "steps": str(job_state["progress"]["step"]),
        "data": without_folder(config.task_options.get("data", "of the task")),
        "rows": _rows(run),
        "data_sha256": str(job_state.get("data")),  # of the training rows
        "strategy": without_folder(config.strategy),
        "ranks": str(config.nproc),
        "device": config.device,
        "precision": config.precision,
        "environment": ", ".join(f"{package} {number}" for package, number in versions.items()),
    }


def provenance_of(run: Run, checkpoint: Path) -> dict[str, str]:
    """Return the provenance of a checkpoint of a run as texts by name."""
    job_state = Checkpoint(checkpoint).job_state()
    folder = Path(str(run.config.out))
    return provenance(type(run.module).__name__, job_state, run.config, folder)


@cache  # every checkpoint needs it
def environment(strategy: str, task: str) -> dict[str, str]:
    """Return the versions that a result depends on, by package.

    They are Python, the core, the task's distribution, and the strategy's distribution with its
    requirements. Packages without metadata, which run from their sources, are left out.
    """
    versions = {"python": platform.python_version()}
    task_entries = registry.offers("tasks").get(task, ())
    of_task = [entry.dist.name for entry in task_entries if entry.dist is not None]
    for package in dict.fromkeys((*PACKAGES, *_behind(strategy), *of_task)):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _behind(strategy: str) -> Iterator[str]:
    """Yield the names of the strategy's distribution and of what it requires."""
    for entry in registry.offers("strategies").get(strategy, ()):
        if entry.dist is not None and entry.dist.name not in PACKAGES:
            yield entry.dist.name
            for requirement in entry.dist.requires or ():
                if "extra ==" not in requirement:
                    yield re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def without_folder(value: object) -> str:
    """Return a name, or an absolute path's last part."""
    if isinstance(value, str) and os.path.isabs(value):
        return os.path.basename(value)
    return str(value)


def _rows(run: Path) -> str:
    try:
        report: Report = json.loads((run / "report.json").read_text(encoding="utf-8"))
        return f"{report['data']['train']['rows']} rows"
    except (OSError, ValueError, KeyError, TypeError):
        return "number of rows not reported"

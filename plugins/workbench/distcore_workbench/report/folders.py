"""Run folders: those that a command line means, their config and their report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore import ConfigError, RunConfig, load_config
from distcore.files import is_locked
from distcore.lab import flatten


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """A run folder."""

    folder: Path
    """Where it is."""
    config: RunConfig
    """The content of config.yaml."""
    report: Mapping[str, Any]
    """The content of report.json; empty if the run is not finished."""

    @property
    def values(self) -> dict[str, Any]:
        """The values of the config by dotted key."""
        return flatten(self.config.model_dump(mode="json"))


def folders_of(
    paths: Sequence[Path], command: str, what_to_give: str = "give run folders"
) -> list[Path]:
    """Return the run folders; a folder that is none is replaced by those inside it.

    Raises ConfigError if there is none: ``command`` opens the message, and ``what_to_give`` closes
    it.
    """
    folders: list[Path] = []
    for path in paths:
        inside = (
            [path]
            if (path / "config.yaml").is_file()
            else [p.parent for p in sorted(path.glob("*/config.yaml"))]
        )
        if not inside:
            why = "no run folder: it has no config.yaml" if path.is_dir() else "no such folder"
            raise ConfigError(f"{command} {path}: {why}; {what_to_give}")
        folders += inside
    return list(dict.fromkeys(folders))


def read(folder: Path) -> RunFolder:
    """Read a run folder; raises ConfigError if it cannot be read."""
    report, file = {}, report_of(folder)
    if file is not None:
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from None
        if not isinstance(report, dict):
            raise ConfigError(f"{file}: cannot be read: expected a JSON object")
    return RunFolder(
        folder=folder, config=load_config(str(folder / "config.yaml"), {}), report=report
    )


def report_of(folder: Path) -> Path | None:
    """Return the report of a finished run.

    A running one may have an old report, from before it was resumed.
    """
    file = folder / "report.json"
    return file if file.is_file() and not is_locked(folder / "config.yaml") else None


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the paths of the folders, without their common beginning."""
    above = os.path.commonpath([folder.absolute().parent for folder in folders])
    return [str(folder.absolute().relative_to(above)) for folder in folders]

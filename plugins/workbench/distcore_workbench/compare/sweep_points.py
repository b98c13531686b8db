"""The request for a sweep, its runs, resolved and checked, and the table of what they came to."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore import ConfigError, DistcoreError, RankError, load_config
from distcore.cli import JobRequest
from distcore.files import same_place
from distcore.lab import Completed, check, complete, flatten, resolve, with_absolute_paths
from distcore_workbench.compare import finished
from distcore_workbench.compare.comparison_rows import is_of_job
from distcore_workbench.compare.sweep_launch import Launching
from distcore_workbench.compare.sweep_runs import Point
from distcore_workbench.pages.document import command_line
from distcore_workbench.report.folders import read
from distcore_workbench.report.side_by_side import facts_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRequest(JobRequest):
    """The flags of ``distcore train`` that a sweep has a say in."""

    sweeps: Sequence[str]
    """The values of ``--sweep``."""
    dry_run: bool = False
    """Whether only to print what would run."""
    trials: int | None = None
    """How many settings to draw; ``None``: every combination."""
    sampler: str | None = None
    """Who draws them; ``None``: the default."""
    prune: bool = False
    """Whether to end runs early that fall behind."""
    how: Launching | None = None
    """The launcher of the runs; ``None``: each starts its ranks on this machine."""


def points_of(
    request: JobRequest, settings: Mapping[str, Mapping[str, Any]], out: Path
) -> list[Point]:
    """Resolve and check every run with its data; raises ConfigError for the first that cannot."""
    points = []
    for name, settings_of_run in settings.items():
        folder = out / name
        resume = "auto" if (folder / "config.yaml").exists() else None
        changes = {
            **request.changes,
            **settings_of_run,
            "out": str(folder),
            "resume": resume,
        }
        config = load_config(request.config, changes)
        try:
            resolved = resolve(config)
            completed = complete(resolved, check(resolved))
        except DistcoreError as error:
            raise ConfigError(f"run {name}: {error}") from None
        if resume:
            _check_same_job(folder, completed)
        # What the user left open stays so: the run itself compares the two forms, and may go
        # back to padding.
        points.append(Point(name=name, config=completed.config_as_requested))
    return points


def _check_same_job(folder: Path, completed: Completed) -> None:
    """Raise ConfigError if the run that is there was started with other values."""
    there = flatten(load_config(str(folder / "config.yaml"), {}).model_dump(mode="json"))
    now = with_absolute_paths(completed)
    for key, value in flatten(now.model_dump(mode="json")).items():
        if is_of_job(key) and not same_place(there.get(key), value):
            raise ConfigError(
                f"run {folder}: is there with {key} = {there.get(key)!r}, now it is {value!r};"
                " choose another --out"
            )


def show(
    out: Path, points: Sequence[Point], codes: Mapping[str, int], more: Sequence[str] = ()
) -> int:
    """Print the runs that began, the failed ones, and ``more`` lines; return the exit code."""
    folders = [point.folder for point in points]
    runs = [read(folder) for folder in folders if (folder / "config.yaml").is_file()]
    if runs:
        finished.show(facts_of(runs, command_line()))
    failed = {name: code for name, code in codes.items() if code}
    for name, code in failed.items():
        print(f"{name}: failed with exit code {code}")
    for line in more:
        print(line)
    print(
        f"sweep: {out}; this table again, or as a page: distcore compare {shlex.quote(str(out))}"
        " [--out DIR]"
    )
    return RankError.exit_code if failed else 0

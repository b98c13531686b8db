"""``distcore train --sweep``: one job with several settings, a run for each, and at the end the table of all."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from distcore import ConfigError, DistcoreError, RankError, flatten, load_config
from distcore.cli import JobRequest
from distcore.files import same_place
from distcore.jobs import Completed, check, complete, resolve, set_up_logging, with_absolute_paths
from distcore_workbench.compare import finished
from distcore_workbench.compare.comparison_rows import is_of_job, refuse_ranks
from distcore_workbench.compare.sweep_runs import Point, Runs
from distcore_workbench.compare.sweep_space import axes_of, combinations
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


def run(request: SweepRequest) -> int:
    """Train with each setting that is not there yet, show all, and return the exit code: 0, or 3 if a run failed.

    Raises DistcoreError before the first run starts, and StoppedError.
    """
    if not request.sweeps:
        raise ConfigError("--trials, --sampler and --prune: are of a sweep; give --sweep KEY=LOW..HIGH, too")
    refuse_ranks("--sweep")
    base = request.load()
    out = Path(base.out or f"runs/sweep-{datetime.now():%Y%m%d-%H%M%S}")
    set_up_logging(base, rank=0)
    if (out / "config.yaml").exists():
        raise ConfigError(f"--out {out}: holds a run; a sweep needs a folder of its own")
    axes = axes_of(request.sweeps, request.changes)
    runs = Runs(command_line() + ("" if base.out else f" --out {out}"))
    if request.trials is not None:
        from distcore_workbench.compare.trials import search  # imports optuna

        return search(request, axes, out, runs)
    if request.sampler or request.prune:
        raise ConfigError(
            f"{'--sampler' if request.sampler else '--prune'}: is of trials; say how many with --trials N"
        )
    points = points_of(request, combinations(axes), out)
    if request.dry_run:
        for point in points:
            print(f"{point.name}: {'finished' if point.finished else 'to train'}, in {point.folder}")
        return 0
    codes = {}
    for number, point in enumerate(points, 1):
        codes[point.name] = runs.train(point, f"run {number} of {len(points)}")
    return show(out, points, codes)


def show(out: Path, points: Sequence[Point], codes: Mapping[str, int], more: Sequence[str] = ()) -> int:
    """Print the table of the runs that began, which of them failed, and ``more`` lines; return the exit code."""
    if begun := [point.folder for point in points if (point.folder / "config.yaml").is_file()]:
        finished.show(facts_of([read(folder) for folder in begun], command_line()))
    failed = {name: code for name, code in codes.items() if code}
    for name, code in failed.items():
        print(f"{name}: failed with exit code {code}")
    for line in more:
        print(line)
    print(f"sweep: {out}; this table again, or as a page: distcore compare {shlex.quote(str(out))} [--out DIR]")
    return RankError.exit_code if failed else 0


def points_of(request: JobRequest, settings: Mapping[str, Mapping[str, Any]], out: Path) -> list[Point]:
    """Resolve and check every run, its data included; raises ConfigError for the first that cannot run."""
    points = []
    for name, own in settings.items():
        folder = out / name
        resume = "auto" if (folder / "config.yaml").exists() else None
        changes = dict(request.changes) | dict(own) | {"out": str(folder), "resume": resume}
        config = load_config(request.config, changes)
        try:
            resolved = resolve(config)
            completed = complete(resolved, check(resolved))
        except DistcoreError as error:
            raise ConfigError(f"run {name}: {error}") from None
        if resume:
            _check_same_job(folder, completed)
        # What the user left open stays so: the run itself compares the two forms, and may go back to padding.
        points.append(Point(name=name, config=completed.config_as_asked))
    return points


def _check_same_job(folder: Path, completed: Completed) -> None:
    """Raise ConfigError if the run that is there was started with other values."""
    there = flatten(load_config(str(folder / "config.yaml"), {}).model_dump(mode="json"))
    now = with_absolute_paths(completed)
    for key, value in flatten(now.model_dump(mode="json")).items():
        if is_of_job(key) and not same_place(there.get(key), value):
            raise ConfigError(
                f"run {folder}: is there with {key} = {there.get(key)!r}, now it is {value!r}; choose another --out"
            )

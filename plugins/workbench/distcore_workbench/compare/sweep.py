"""``distcore train --sweep``: one job with several settings, a run for each, and at the end the table of all."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from distcore import (
    ConfigError,
    DistcoreError,
    RankError,
    RunConfig,
    StoppedError,
    dump_config,
    flatten,
    load_config,
)
from distcore.cli import canonical, parse_values
from distcore.files import same_place
from distcore.jobs import Completed, check, complete, handle_stop_signals, resolve, set_up_logging, with_absolute_paths
from distcore_workbench.compare import finished
from distcore_workbench.compare.comparison_rows import folder_name, is_of_job, refuse_ranks
from distcore_workbench.compare.runs import end, train_command
from distcore_workbench.pages.document import command_line
from distcore_workbench.report.folders import read
from distcore_workbench.report.side_by_side import facts_of

NOT_SWEPT = ("out", "resume", "resume_changed")
"""Keys that every run of a sweep gets from the sweep."""
STOPPED = (143, 130, -15, -2)
"""How a run ends that SIGTERM or Ctrl-C has stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a sweep."""

    name: str
    """Its settings, such as ``lr=0.0001,seed=1``; also the name of its folder."""
    config: RunConfig
    """Resolved."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(str(self.config.out))

    @property
    def finished(self) -> bool:
        """True if the run is there already, with its report."""
        return (self.folder / "report.json").is_file()


def run(file: str | None, changes: Mapping[str, Any], sweeps: Sequence[str], dry_run: bool) -> int:
    """Train with each setting that is not there yet, show all, and return the exit code: 0, or 3 if a run failed.

    ``file`` and ``changes`` are as for ``load_config``, ``sweeps`` the values of ``--sweep``. ``dry_run``: only print
    what would run. Raises DistcoreError before the first run starts, and StoppedError.
    """
    refuse_ranks("--sweep")
    base = load_config(file, dict(changes))
    out = Path(base.out or f"runs/sweep-{datetime.now():%Y%m%d-%H%M%S}")
    set_up_logging(base, rank=0)
    points = points_of(file, changes, settings_of(sweeps, changes), out)
    if dry_run:
        for point in points:
            print(f"{point.name}: {'finished' if point.finished else 'to train'}, in {point.folder}")
        return 0
    failed = _Runs(points, command_line() + ("" if base.out else f" --out {out}")).train()
    if begun := [point.folder for point in points if (point.folder / "config.yaml").is_file()]:
        finished.show(facts_of([read(folder) for folder in begun], command_line()))
    for name, code in failed.items():
        print(f"{name}: failed with exit code {code}")
    print(f"sweep: {out}; this table again, or as a page: distcore compare {shlex.quote(str(out))} [--out DIR]")
    return RankError.exit_code if failed else 0


def settings_of(sweeps: Sequence[str], changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each run by its name: all combinations, the last key changing fastest.

    Raises ConfigError for a key that cannot be swept, is set otherwise too, or has a value twice.
    """
    axes: dict[str, list[Any]] = {}
    for text in sweeps:
        key, _, listed = text.partition("=")
        if not key or not listed:
            raise ConfigError(f"--sweep {text}: expected KEY=VALUE,VALUE, such as --sweep lr=1e-4,3e-4")
        if key in NOT_SWEPT:
            raise ConfigError(f"--sweep {text}: each run of a sweep has its own {key}; choose another key")
        if canonical(key) in map(canonical, (*axes, *changes)):
            raise ConfigError(f"--sweep {text}: {key} is set twice; keep one of them")
        axes[key] = parse_values(listed)
    if "resume" in changes:
        raise ConfigError("--sweep: goes on by itself with the runs that are not finished; leave out --resume")
    rows: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        name = folder_name(",".join(f"{key}={_text(value)}" for key, value in settings.items()))
        if name in rows:
            raise ConfigError(f"--sweep: {name} is there twice; name each value once")
        rows[name] = settings
    return rows


def points_of(
    file: str | None, changes: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]], out: Path
) -> list[Point]:
    """Resolve and check every run, its data included; raises ConfigError for the first that cannot run."""
    if (out / "config.yaml").exists():
        raise ConfigError(f"--out {out}: holds a run; a sweep needs a folder of its own")
    points = []
    for name, own in settings.items():
        folder = out / name
        resume = "auto" if (folder / "config.yaml").exists() else None
        config = load_config(file, dict(changes) | dict(own) | {"out": str(folder), "resume": resume})
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


class _Runs:
    """Trains the runs of a sweep, one after the other, each in a process of its own; SIGTERM and Ctrl-C end them."""

    def __init__(self, points: Sequence[Point], again: str) -> None:
        """Take the runs, and the command that goes on with them if they are stopped."""
        self._points, self._again = points, again
        self._child: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []

    def train(self) -> dict[str, int]:
        """Return the exit codes of the runs that failed, by name; raises StoppedError."""
        failed = {}
        for number, point in enumerate(self._points, 1):
            there = ": finished already" if point.finished else ""
            print(f"run {number} of {len(self._points)}: {point.name}{there}", file=sys.stderr, flush=True)
            if there:
                continue
            with handle_stop_signals(self._stop, says_so=False):  # the run itself does
                code = self._train(point)
            if self._signals or code in STOPPED:
                raise StoppedError(
                    f"sweep stopped in {point.name}; go on with: {self._again}",
                    *(128 + number for number in self._signals[:1]),
                )
            if code:
                failed[point.name] = code
        return failed

    def _train(self, point: Point) -> int:
        with tempfile.TemporaryDirectory(prefix="distcore-sweep-") as folder:
            file = Path(folder, "config.yaml")
            file.write_text(dump_config(point.config), encoding="utf-8")
            more = ["--resume", "auto"] if point.config.resume else []
            more += ["--max-restarts", str(point.config.max_restarts)] if point.config.max_restarts else []
            self._child = subprocess.Popen([*train_command(file, point.folder), *more])
            try:
                return self._child.wait()
            finally:
                end(self._child)

    def _stop(self, number: int) -> None:
        """Pass the signal on: a run that gets SIGTERM ends after a checkpoint."""
        self._signals.append(number)
        if self._child is not None and self._child.returncode is None:
            self._child.terminate()


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))

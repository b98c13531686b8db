"""``distcore compare``: one job under several strategies, or finished runs, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distcore import ConfigError
from distcore.cli import (
    FLAGS,
    add_job_flags,
    changes_of,
    flags_that_start,
    is_launcher_asked,
    spec_of,
)

if TYPE_CHECKING:
    from distcore.cli import JobRequest

SUMMARY = "run one job under several strategies, side by side"

NOT_HERE = ("--strategy", "--max-restarts", "--out", "--overwrite", "--resume", "--resume-changed")
"""Flags of ``distcore train`` that a comparison sets by itself."""
FOR_JOBS: dict[str, object] = {
    "strategies": "",
    "row": [],
    "reference": None,
    "rounds": 1,
    "interleave": True,
    "warm_up": 2,
    "communication": True,
    "allow_different": "",
    "skip_missing": False,
}
"""Flags that say how a job is compared, with their defaults. Finished runs take none of them."""

_Request = TypeVar("_Request", bound="JobRequest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = (
        "distcore compare [CONFIG.yaml] --strategies NAME,NAME:VALUE,… [FLAGS]\n"
        "       distcore compare RUN RUN… [--out DIR]"
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="CONFIG.yaml | RUN",
        help="config file of the job, or the folders of finished runs",
    )
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--strategies", metavar="NAMES", help="rows: strategies, or NAME:VALUE, separated by commas"
    )
    group.add_argument(
        "--row", action="append", metavar="'NAME KEY=VALUE'",
        help="add a row that sets config keys of its own; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--reference", metavar="ROW", help="row to measure distances from (default: the first)"
    )
    group.add_argument(
        "--rounds", type=int, metavar="N", help="times to run every row (default: 1)"
    )
    group.add_argument(
        "--interleave",
        action=argparse.BooleanOptionalAction,
        help=(
            "all rows in every round, every second round in reverse; no: one row after the other"
            " (default: yes)"
        ),
    )
    group.add_argument(
        "--warm-up",
        type=int,
        metavar="STEPS",
        help="first steps, not counted for speed (default: 2)",
    )
    group.add_argument(
        "--communication", action=argparse.BooleanOptionalAction,
        help="measure communication in one more, short run of every row (default: yes)",
    )  # fmt: skip
    group.add_argument(
        "--allow-different",
        metavar="KEYS",
        help="accept and mark rows that differ in these config keys",
    )
    group.add_argument(
        "--skip-missing",
        action="store_true",
        help="leave out rows that cannot run here, and say why",
    )
    group.add_argument(
        "--out",
        dest="folder",
        metavar="DIR",
        help=(
            "folder for compare.html, .md and .json (default: a new one under runs/; of RUNs: none"
            " is written)"
        ),
    )
    parser.set_defaults(**FOR_JOBS)
    add_job_flags(parser, leave_out=NOT_HERE)


def run(arguments: argparse.Namespace) -> int:
    """Run the comparison and return its exit code; raises DistcoreError."""
    if arguments.paths and not (arguments.strategies or arguments.row):
        return _compare_runs(arguments)
    run_folders = [path for path in arguments.paths if Path(path).is_dir()]
    # A job has one config file.
    not_of_a_job = run_folders or arguments.paths[1:]
    if not_of_a_job:
        raise ConfigError(
            f"compare {not_of_a_job[0]}: give run folders, to compare what is there, or a config"
            " file with --strategies and --row, to run a job; not both"
        )
    for key, least in (("rounds", 1), ("warm_up", 0)):
        value = getattr(arguments, key)
        if value < least:
            raise ConfigError(f"{_flag_of(key)} {value}: must be at least {least}")
    # Imported late: --help and wrong flags must not wait for torch.
    from distcore_workbench.compare import comparison
    from distcore_workbench.compare.comparison_rows import CompareRequest

    values = vars(arguments) | {
        "config": arguments.paths[0] if arguments.paths else None,
        "changes": changes_of(arguments),
        "out": arguments.folder,
    }
    return comparison.run(_request_of(CompareRequest, values))


def _compare_runs(arguments: argparse.Namespace) -> int:
    """Compare finished runs, and return the exit code; raises ConfigError for a flag that only a
    job takes.
    """
    flags_by_key = {flag.key: flag.name for flag in FLAGS}
    flags_of_jobs = [flags_by_key.get(key, f"--set {key}") for key in changes_of(arguments)]
    flags_of_jobs += [
        _flag_of(key) for key, default in FOR_JOBS.items() if getattr(arguments, key) != default
    ]
    if flags_of_jobs:
        raise ConfigError(
            f"{flags_of_jobs[0]}: is for a job to run, with --strategies or --row; finished runs"
            " take --out only"
        )
    # Imported late, as in ``run``.
    from distcore_workbench.compare import finished

    return finished.run([Path(path) for path in arguments.paths], arguments.folder)


def _flag_of(key: str) -> str:
    """Return the flag of an argument of this command."""
    return f"--{key.replace('_', '-')}"


def _request_of(kind: type[_Request], values: Mapping[str, Any]) -> _Request:
    """Return a request of the ``values`` that it has a field for; others keep their defaults."""
    names = [field.name for field in fields(kind) if field.name in values]
    return kind(**{name: values[name] for name in names})


def sweep(arguments: argparse.Namespace) -> int:
    """Train once for each setting of ``distcore train --sweep``, and return the exit code;
    raises DistcoreError.

    ``arguments``: those of ``distcore train``.
    """
    # Imported late, as in ``run``.
    from distcore.registry import load
    from distcore_workbench.compare.sweep import run
    from distcore_workbench.compare.sweep_launch import Launching
    from distcore_workbench.compare.sweep_points import SweepRequest

    values = vars(arguments) | {"sweeps": arguments.sweep, "changes": changes_of(arguments)}
    if is_launcher_asked(arguments):
        launcher_name = values.get("launcher", "local").partition(":")[0]
        make_launcher = load("launchers", launcher_name)
        values["how"] = Launching(
            launcher=make_launcher(),
            spec=partial(spec_of, arguments),
            flags=tuple(flags_that_start(arguments.argv)),
        )
    return run(_request_of(SweepRequest, values))

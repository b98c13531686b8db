"""``distcore compare``: one job under several strategies, or runs that are there, side by side."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path

from distcore import ConfigError
from distcore.cli import (
    FLAGS,
    add_job_flags,
    changes_of,
    flags_that_start,
    is_launcher_asked,
    spec_of,
)

SUMMARY = "run one job under several strategies, side by side"

NOT_HERE = ("--strategy", "--max-restarts", "--out", "--resume", "--resume-changed")
"""Flags of ``distcore train`` that a comparison sets by itself."""
FOR_JOBS: dict[str, object] = {
    "strategies": "", "row": [], "reference": None, "rounds": 1, "interleave": True, "warm_up": 2,
    "communication": True, "allow_different": "", "skip_missing": False,
}  # fmt: skip
"""The flags that say how a job is compared, with their defaults: runs that are there
take none of them.
"""


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
    if more := [path for path in arguments.paths if Path(path).is_dir()] or arguments.paths[1:]:
        raise ConfigError(
            f"compare {more[0]}: give run folders, to compare what is there, or a config file with"
            " --strategies and --row, to run a job; not both"
        )
    for flag, least in (("rounds", 1), ("warm_up", 0)):
        if getattr(arguments, flag) < least:
            raise ConfigError(
                f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: must be at least {least}"
            )
    # Imported late: --help and wrong flags must not wait for torch.
    from distcore_workbench.compare import comparison
    from distcore_workbench.compare.comparison_rows import CompareRequest

    given = vars(arguments) | {"config": next(iter(arguments.paths), None)}
    asked = {
        field.name: given[field.name] for field in fields(CompareRequest) if field.name in given
    }
    return comparison.run(
        CompareRequest(**asked | {"changes": changes_of(arguments), "out": arguments.folder})
    )


def _compare_runs(arguments: argparse.Namespace) -> int:
    flags = {flag.key: flag.name for flag in FLAGS}
    given = [flags.get(key, f"--set {key}") for key in changes_of(arguments)]
    given += [
        f"--{key.replace('_', '-')}"
        for key, default in FOR_JOBS.items()
        if getattr(arguments, key) != default
    ]
    if given:
        raise ConfigError(
            f"{given[0]}: is for a job to run, with --strategies or --row; finished runs take --out"
            " only"
        )
    from distcore_workbench.compare import finished

    return finished.run([Path(path) for path in arguments.paths], arguments.folder)


def sweep(arguments: argparse.Namespace) -> int:
    """Do what ``distcore train --sweep`` asks for: a run for each setting; return the
    exit code. Raises DistcoreError.

    ``arguments``: those of ``distcore train``.
    """
    from distcore.registry import load
    from distcore_workbench.compare.sweep import run
    from distcore_workbench.compare.sweep_launch import Launching
    from distcore_workbench.compare.sweep_points import SweepRequest

    given = vars(arguments) | {"sweeps": arguments.sweep, "changes": changes_of(arguments)}
    if is_launcher_asked(arguments):
        given["how"] = Launching(
            launcher=load("launchers", given.get("launcher", "local").partition(":")[0])(),
            spec=partial(spec_of, arguments),
            flags=tuple(flags_that_start(arguments.argv)),
        )
    return run(
        SweepRequest(
            **{
                field.name: given[field.name]
                for field in fields(SweepRequest)
                if field.name in given
            }
        )
    )

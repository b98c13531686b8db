"""``distcore tune``: its flags. The search is imported only when it runs, to keep help fast."""

from __future__ import annotations

import argparse

from distcore import ConfigError
from distcore.cli import add_job_flags, changes_of

SUMMARY = "find the fastest setting of a job that keeps its mathematics, by short runs"

NOT_HERE = ("--max-restarts", "--out", "--overwrite", "--resume", "--resume-changed")
"""Flags of ``distcore train`` that a tune sets by itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore tune [CONFIG.yaml] [--budget MINUTES] [--fit-only] [FLAGS]"
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG.yaml",
        default=None,
        help="config file; flags override it",
    )
    group = parser.add_argument_group("tune")
    group.add_argument(
        "--budget", metavar="MINUTES", default="10",
        help="time for all trials, those of an earlier call that goes on included (default: 10)",
    )  # fmt: skip
    group.add_argument(
        "--strategies", metavar="NAMES", default="",
        help="try these only, NAME or NAME:OPTION=VALUE,…, separated by commas (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--fit-only",
        action="store_true",
        default=False,
        help="the first setting that fits into memory, not the fastest",
    )
    group.add_argument(
        "--json", action="store_true", default=False, help="print JSON instead of tables"
    )
    group.add_argument(
        "--out",
        dest="folder",
        metavar="DIR",
        default=None,
        help=(
            "folder for config.yaml, tune.html and the trials; one that has some goes on (default:"
            " under runs/)"
        ),
    )
    add_job_flags(parser, leave_out=NOT_HERE)


def run(arguments: argparse.Namespace) -> int:
    """Tune and return the exit code; raises DistcoreError."""
    budget = _minutes(arguments.budget)
    changes = changes_of(arguments)
    for key in ("out", "overwrite", "resume", "max_restarts"):
        if key in changes:
            raise ConfigError(f"--set {key}: trials have a folder of their own; leave it out")
    # The threads of trials see for themselves whether cores are idle: in here nothing computes.
    from distcore_workbench.tuning import tune
    from distcore_workbench.tuning.candidates import TuneRequest

    return tune.run(
        TuneRequest(
            config=arguments.config,
            changes=changes,
            budget=budget,
            strategies=arguments.strategies,
            fit_only=arguments.fit_only,
            json=arguments.json,
            out=arguments.folder,
        )
    )


def _minutes(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--budget {text}: expected minutes, such as 10 or 0.5") from None

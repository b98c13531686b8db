"""``distcore report``: the curves, tables and answers of runs, in the terminal and
as one HTML page.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distcore_workbench.report.plots import Plots

SUMMARY = "curves, tables and answers of runs, in the terminal or as a page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore report RUN… [--html FILE] [--follow] [--all]"
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folder; a folder that is none stands for the runs in it",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the report as a page instead: one file, no network",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="in the terminal also wrong predictions, the other curves, times and memory",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="draw the curves while the runs train, until all have ended",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the report and return the exit code; raises DistcoreError."""
    from distcore_workbench.report import reporting

    return reporting.run(arguments.paths, arguments.html, arguments.follow, arguments.all)


def plots(folder: Path) -> Plots:
    """Return the curves of a run for ``report.plot()``; raises DistcoreError."""
    from distcore_workbench.report.plots import Plots

    return Plots(folder)

"""``distcore watch``: one screen that follows a run by its files."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "one screen that follows a run: curves, speed, ranks, memory and time left"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore watch RUN"
    parser.add_argument(
        "run_folder", type=Path, metavar="RUN", help="run folder, of this machine or another one"
    )


def run(arguments: argparse.Namespace) -> int:
    """Follow the run until it ends, and return the exit code; raises DistcoreError."""
    from distcore.cli import stdout_console
    from distcore_workbench.observe.watch import folder_of, watch

    watch(folder_of(arguments.run_folder), stdout_console())
    return 0

"""``distcore tasks``: list the installed tasks, what they measure, and their options."""

from __future__ import annotations

import argparse

from distcore.cli import listing
from distcore.cli.listing import add_arguments as add_arguments

SUMMARY = "list the installed tasks: their metrics, and their options"


def run(arguments: argparse.Namespace) -> int:
    """Print the tasks and return 0."""
    from distcore.cli.task_catalogue import CATALOGUE

    return listing.run(arguments, CATALOGUE)

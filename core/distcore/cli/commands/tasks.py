"""``distcore tasks``: list the installed tasks, what they measure, and their options."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the tasks and return 0."""
    from distcore.cli.task_catalogue import describe_all, show

    if arguments.json:
        print(json.dumps(describe_all(), indent=1))
    else:
        show(describe_all())
    return 0

"""``distcore eval``: evaluate a checkpoint. The job is imported only when it runs, to keep help fast."""

from __future__ import annotations

import argparse
from pathlib import Path

from distcore.cli.flags import add_choice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore eval RUN_OR_CHECKPOINT [FLAGS]"
    parser.add_argument(
        "target", metavar="RUN_OR_CHECKPOINT", help="a run folder (its newest checkpoint) or step-NNNNNNNN"
    )
    add_choice(parser)
    parser.add_argument(
        "--strategy", metavar="NAME", default="single", help="strategy to evaluate with (default: single)"
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks to start here (default: 1)")
    parser.add_argument("--task", metavar="NAME", help="name or file.py:Class of a task that train() got as an object")
    parser.add_argument("--data", metavar="FILE", help="rows to evaluate on (default: the test rows of the run)")
    parser.add_argument(
        "--set", dest="set", action="append", default=[], metavar="KEY=VALUE",
        help="set any config key, such as strategy_options.NAME=VALUE; repeatable",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of the report")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and return 0; raises DistcoreError."""
    from distcore.config import parse_settings
    from distcore.jobs import evaluate

    changes = {"strategy": arguments.strategy} | parse_settings(arguments.set)
    if arguments.task:
        changes["task"] = arguments.task
    if arguments.data:
        changes["test_data"] = arguments.data
    evaluate.run(Path(arguments.target), changes, arguments.nproc, arguments.json, arguments.step, arguments.best)
    return 0

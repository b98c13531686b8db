"""``distcore eval``: evaluate a checkpoint. The job is imported only when it runs,
to keep help fast.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from distcore.cli import waiting
from distcore.cli.flags import add_ranks, changes_of
from distcore.errors import ConfigError, DataError

SUMMARY = "evaluate a checkpoint, under any strategy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore eval RUN_OR_CHECKPOINT [FLAGS]"
    add_ranks(parser, "evaluate")
    parser.add_argument(
        "--data", metavar="FILE", help="rows to evaluate on (default: the test rows of the run)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the report")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and return 0; raises DistcoreError."""
    waiting.sleep_if_busy()
    from distcore.jobs import evaluate

    changes = changes_of(arguments) | ({"test_data": arguments.data} if arguments.data else {})
    try:
        evaluate.run(
            Path(arguments.target),
            changes,
            arguments.nproc,
            arguments.json,
            arguments.step,
            arguments.best,
        )
    except ConfigError as error:
        if not arguments.data or "unknown key 'test_data'" not in str(error):
            raise
        raise ConfigError(
            f"--data {arguments.data}: the task of this run makes its own rows, and reads none"
        ) from None
    except DataError as error:
        # a column that is named anew would be missing from the training rows instead
        remedy = "all files of a run have the same columns; rows without labels: distcore predict"
        raise DataError(re.sub(r"name it with --set \S+=NAME", remedy, str(error))) from None
    return 0

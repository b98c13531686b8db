"""``distcore predict``: predict rows without labels. The job is imported only when it runs,
to keep help fast.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from distcore.cli import waiting
from distcore.cli.flags import OPTION, Flag, add_ranks, changes_of

SUMMARY = "predict rows without labels, under any strategy"

COLUMNS = [
    Flag(
        "--text-column",
        "NAME",
        "as in training",
        "column that holds the text",
        f"{OPTION}columns.text",
    ),
    Flag(
        "--id-column",
        "NAME",
        "none",
        "column that names the row in its line",
        f"{OPTION}columns.id",
    ),
]
"""Said in error messages, too, in place of the options that they set."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore predict RUN_OR_CHECKPOINT --data FILE --out FILE [FLAGS]"
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="the rows (.jsonl .csv .parquet .json; of images also a folder, .npz); no labels",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="the .jsonl file to write: one line per row, in order",
    )
    for flag in COLUMNS:
        parser.add_argument(
            flag.name, metavar=flag.takes, help=f"{flag.help} (default: {flag.default})"
        )
    parser.task_flags = COLUMNS  # type: ignore[attr-defined]
    add_ranks(parser, "predict")


def run(arguments: argparse.Namespace) -> int:
    """Predict and return 0; raises DistcoreError."""
    waiting.sleep_if_busy()
    from distcore.jobs import predict

    changes = changes_of(arguments)
    if arguments.text_column:
        changes[COLUMNS[0].key] = arguments.text_column
    predict.run(
        Path(arguments.target),
        arguments.data,
        arguments.out,
        changes,
        arguments.nproc,
        arguments.step,
        arguments.best,
        arguments.id_column,
    )
    return 0

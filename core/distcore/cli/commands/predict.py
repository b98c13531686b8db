"""``distcore predict``: predict rows without labels. The job is imported only when it runs, to keep help fast."""

from __future__ import annotations

import argparse
from pathlib import Path

from distcore.cli import waiting
from distcore.cli.flags import OPTION, Flag, add_choice, add_ranks

SUMMARY = "predict rows without labels, under any strategy"

TEXT_COLUMN = Flag("--text-column", "NAME", "as in training", "column that holds the text", f"{OPTION}columns.text")
"""Said in error messages, too, in place of the option that it sets."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore predict RUN_OR_CHECKPOINT --data FILE --out FILE [FLAGS]"
    parser.add_argument("target", metavar="RUN_OR_CHECKPOINT", help="a run (its newest checkpoint) or step-NNNNNNNN")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="the rows (.jsonl .csv .parquet .json; of images also a folder, .npz); no labels",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the .jsonl file to write: one line per row, in order"
    )
    parser.add_argument(
        TEXT_COLUMN.name, metavar=TEXT_COLUMN.takes, help=f"{TEXT_COLUMN.help} (default: {TEXT_COLUMN.default})"
    )
    parser.add_argument("--id-column", metavar="NAME", help="column that names the row in its line (default: none)")
    parser.task_flags = [TEXT_COLUMN]  # type: ignore[attr-defined]
    add_choice(parser)
    add_ranks(parser, "predict")


def run(arguments: argparse.Namespace) -> int:
    """Predict and return 0; raises DistcoreError."""
    waiting.sleep_if_busy()
    from distcore.cli.flags import changes_of
    from distcore.jobs import predict

    changes, given = changes_of(arguments), arguments
    if given.text_column:
        changes[TEXT_COLUMN.key] = given.text_column
    target = Path(given.target)
    predict.run(target, given.data, given.out, changes, given.nproc, given.step, given.best, given.id_column)
    return 0

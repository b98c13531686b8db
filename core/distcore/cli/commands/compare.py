"""``distcore compare``: one job under several strategies, side by side."""

from __future__ import annotations

import argparse

from distcore.cli.commands.train import add_job_flags, changes_of
from distcore.errors import ConfigError

NOT_HERE = ("--strategy", "--max-restarts", "--out", "--resume", "--resume-changed")
"""Flags of ``distcore train`` that a comparison sets by itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore compare [CONFIG.yaml] --strategies NAME,NAME:VALUE,… [FLAGS]"
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--strategies", default="", metavar="NAMES", help="rows: strategies, or NAME:VALUE, separated by commas"
    )
    group.add_argument(
        "--row", action="append", default=[], metavar="'NAME KEY=VALUE'",
        help="add a row that sets config keys of its own; repeatable",
    )  # fmt: skip
    group.add_argument("--reference", metavar="ROW", help="row to measure distances from (default: the first)")
    group.add_argument("--rounds", type=int, default=1, metavar="N", help="times to run every row (default: 1)")
    group.add_argument(
        "--interleave", action=argparse.BooleanOptionalAction, default=True,
        help="all rows in every round, every second round backwards; no: one row after the other (default: yes)",
    )  # fmt: skip
    group.add_argument(
        "--warm-up", type=int, default=2, metavar="STEPS", help="first steps, not counted for speed (default: 2)"
    )
    group.add_argument(
        "--communication", action=argparse.BooleanOptionalAction, default=True,
        help="measure communication in one more, short run of every row (default: yes)",
    )  # fmt: skip
    group.add_argument(
        "--allow-different", default="", metavar="KEYS", help="accept and mark rows that differ in these config keys"
    )
    group.add_argument("--skip-missing", action="store_true", help="leave out rows that cannot run here, and say why")
    group.add_argument(
        "--out",
        dest="folder",
        metavar="DIR",
        help="folder for compare.html, .md and .json (default: a new one under runs/)",
    )
    add_job_flags(parser, leave_out=NOT_HERE)


def run(arguments: argparse.Namespace) -> int:
    """Run the comparison and return its exit code; raises DistcoreError."""
    for flag, least in (("rounds", 1), ("warm_up", 0)):
        if getattr(arguments, flag) < least:
            raise ConfigError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: must be at least {least}")
    # Imported late: --help and wrong flags must not wait for torch.
    from distcore.compare import comparison
    from distcore.compare.rows import Request

    given = vars(arguments)
    asked = {name: given[name] for name in Request.__annotations__ if name in given}
    return comparison.run(Request(**asked | {"changes": changes_of(arguments), "out": arguments.folder}))

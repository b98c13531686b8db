"""``distcore train``: its flags. What they start is imported when it is started."""

from __future__ import annotations

import argparse
from collections.abc import Container

from distcore.flags import GROUPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "distcore train [CONFIG.yaml] [FLAGS]"
    other = add_job_flags(parser)
    other.add_argument(
        "--profile", dest="set", action="append_const", const="extensions.profile=true",
        help="say where the time of a step goes, and write a trace",
    )  # fmt: skip
    other.add_argument("--dry-run", action="store_true", default=False, help="print the resolved config and stop")


def add_job_flags(parser: argparse.ArgumentParser, leave_out: Container[str] = ()) -> argparse._ArgumentGroup:
    """Add what defines a job: the config file, a flag for each key that has one, ``--set``; return the last group."""
    parser.argument_default = argparse.SUPPRESS  # only what the user gave overrides the file
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", default=None, help="config file; flags override it")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag.name not in leave_out:
                group.add_argument(
                    flag.name, dest=flag.key, metavar=flag.takes, help=f"{flag.help} (default: {flag.default})"
                )
    other = parser.add_argument_group("other")
    other.add_argument(
        "--set", dest="set", action="append", default=[], metavar="KEY=VALUE",
        help="set any config key, such as optimizer.eps=1e-6; repeatable",
    )  # fmt: skip
    return other


def run(arguments: argparse.Namespace) -> int:
    from distcore import job

    return job.run(arguments)

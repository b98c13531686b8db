"""``distcore train``: its flags. What they start is imported when it is started."""

from __future__ import annotations

import argparse

from distcore.flags import GROUPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "distcore train [CONFIG.yaml] [FLAGS]"
    parser.argument_default = argparse.SUPPRESS  # only what the user gave overrides the file
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", default=None, help="config file; flags override it")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            group.add_argument(
                flag.name, dest=flag.key, metavar=flag.takes, help=f"{flag.help} (default: {flag.default})"
            )
    other = parser.add_argument_group("other")
    other.add_argument(
        "--set", dest="set", action="append", default=[], metavar="KEY=VALUE",
        help="set any config key, such as optimizer.eps=1e-6; repeatable",
    )  # fmt: skip
    other.add_argument("--dry-run", action="store_true", default=False, help="print the resolved config and stop")


def run(arguments: argparse.Namespace) -> int:
    from distcore import job

    return job.run(arguments)

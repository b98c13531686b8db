"""``distcore strategies``: what is installed, whether it imports, what it declares, and its options."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    from distcore.cli.catalogue import describe_all, show

    if arguments.json:
        print(json.dumps(describe_all(), indent=1))
    else:
        show(describe_all())
    return 0

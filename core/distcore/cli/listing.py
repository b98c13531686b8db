"""The arguments of the commands that list plugins, and what they print: tables or JSON."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distcore.cli.catalogue import Catalogue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show only this one, or file.py:Class")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace, catalogue: Catalogue) -> int:
    """Print what is installed, or the one that is named, and return 0; raises DistcoreError if that cannot be used."""
    from distcore.cli.catalogue import described, show, show_one

    found = described(catalogue, arguments.name)
    if arguments.json:
        print(json.dumps(found, indent=1))
    elif arguments.name is not None:
        show_one(catalogue, found[0])
    else:
        show(catalogue, found)
    return 0

"""``distcore strategies``: list the installed strategies, what they declare, and their options."""

from __future__ import annotations

import argparse

from distcore.cli import listing
from distcore.cli.listing import add_arguments as add_arguments

SUMMARY = "list the installed strategies: what they declare, and their options"


def run(arguments: argparse.Namespace) -> int:
    """Print the strategies and return 0."""
    from distcore.cli.strategy_catalogue import CATALOGUE

    return listing.run(arguments, CATALOGUE)

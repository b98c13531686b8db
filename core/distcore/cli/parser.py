"""The parser of every command: argparse, with errors of one line, and help as wide as the screen."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from typing import NoReturn

from distcore.cli.flags import flag_of_others, refuse_several
from distcore.errors import ConfigError, nearest

WIDEST = 110
"""Most characters in a line of help; longer lines read badly."""


def help_width() -> int:
    """Return the characters per line of help: the screen's, or what COLUMNS says, and at most ``WIDEST``."""
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)


class Parser(argparse.ArgumentParser):
    """argparse, but an error is a ConfigError of one line that names the nearest flag."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Help, **options)  # type: ignore[arg-type]
        self.argv: list[str] = []
        """What is being parsed."""
        self.more_help: Callable[[list[str]], str] | None = None
        """Returns what ``--help`` adds for these arguments."""
        self.takes_command = False
        """Whether what stands behind ``--`` is a command line, left as it is: ``command_line`` of the namespace."""

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse all of ``argv``; raises ConfigError for an unknown flag and for a missing or unexpected argument."""
        command: list[str] = []
        if self.takes_command and "--" in argv:
            at = argv.index("--")
            argv, command = argv[:at], argv[at + 1 :]
        self.argv = argv
        refuse_several(argv, self._option_string_actions)
        # Not parse_args(): its error for an unknown flag cannot name the nearest one.
        namespace, unknown = self.parse_known_args(argv)
        namespace.argv = argv
        if not unknown:
            if self.takes_command:
                namespace.command_line = command
            return namespace
        flag = unknown[0].partition("=")[0]
        kind = "unknown flag" if flag.startswith("-") else "unexpected argument"
        known = self._option_string_actions
        hint = flag_of_others(flag, known) or nearest(flag, known)
        raise ConfigError(f"{kind} {flag!r}{hint}; {self.prog} --help lists the flags")

    def format_help(self) -> str:
        """Return the text of ``--help``, with what a command adds to it."""
        return super().format_help() + (self.more_help(self.argv) if self.more_help else "")

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError; argparse calls this for every error that it finds."""
        raise ConfigError(f"{message.removeprefix('argument ')} ({self.prog} --help explains)")


class Help(argparse.HelpFormatter):
    """A wide column for flags, so that most have their help on the same line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=help_width())

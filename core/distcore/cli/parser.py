"""The parser of every command: argparse, with errors of one line, and help as wide as the screen."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from typing import NoReturn

from distcore.cli.flags import Flag, flag_of_others, refuse_several
from distcore.errors import ConfigError, DistcoreError, nearest

WIDEST = 110
"""Most characters in a line of help; longer lines read badly."""


def help_width() -> int:
    """Return the characters per line of help: the screen's, or what COLUMNS says, and at most ``WIDEST``."""
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)


class Parser(argparse.ArgumentParser):
    """argparse, but an error is a ConfigError of one line that names the nearest flag."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Help, **options)  # type: ignore[arg-type]
        self.task_group: argparse._ArgumentGroup | None = None
        """Where the flags of the task belong, in a command that has such; empty until they are needed."""
        self.task_flags: list[Flag] = []
        """The flags of the task, once they were added."""
        self.names_task = False
        """Whether the arguments, or their config file, name the task."""
        self.takes_command = False
        """Whether what stands behind ``--`` is a command line, left as it is: ``command_line`` of the namespace."""

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse all of ``argv``; raises ConfigError for an unknown flag and for a missing or unexpected argument."""
        command: list[str] = []
        if self.takes_command and "--" in argv:
            at = argv.index("--")
            argv, command = argv[:at], argv[at + 1 :]
        no_task = self._try_task_flags(argv)
        refuse_several(argv, self._option_string_actions, self.task_flags)
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
        if no_task and (self.names_task or not hint):
            raise no_task  # it may well be a flag of the task
        raise ConfigError(f"{kind} {flag!r}{hint}; {self.prog} --help lists the flags")

    def _try_task_flags(self, argv: Sequence[str]) -> DistcoreError | None:
        """Add the flags of the task where help, or a flag that the command has not, asks for them.

        Returns what is wrong where there are none to add.
        """
        flags = [word.partition("=")[0] for word in argv if word.startswith("-")]
        is_help = not {"-h", "--help"}.isdisjoint(flags)
        if not is_help and not any(flag.startswith("--") for flag in flags if flag not in self._option_string_actions):
            return None
        try:
            self.add_task_flags(argv)
        except DistcoreError as error:
            if is_help and self.names_task:
                raise
            return error
        return None

    def add_task_flags(self, argv: Sequence[str]) -> None:
        """Add the flags of the task that ``argv`` names, if the command has such; raises DistcoreError."""
        if self.task_group is None or self.task_flags:
            return
        from distcore.cli.task_flags import add_to, named_task, task_flags

        name = named_task(argv)
        self.names_task = name != "auto"
        found = task_flags(name, self._option_string_actions)
        add_to(self.task_group, found)
        self.task_flags = found.flags

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError; argparse calls this for every error that it finds."""
        raise ConfigError(f"{message.removeprefix('argument ')} ({self.prog} --help explains)")


class Help(argparse.HelpFormatter):
    """A wide column for flags, so that most have their help on the same line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=help_width())

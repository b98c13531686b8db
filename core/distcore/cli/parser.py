"""The parser of every command: argparse, with errors of one line, and help as
wide as the screen.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from distcore.cli.flags import Flag, refuse_several
from distcore.errors import ConfigError, DistcoreError
from distcore.hints import hint_from_other_libraries, nearest

WIDEST = 110
"""Most characters in a line of help; longer lines read badly."""
UNSAID = ("", "none", "False")
"""Defaults that say nothing."""
ALL = "all"
"""Value of ``--help`` that asks for every flag."""


def help_width() -> int:
    """Return the characters per line of help: those of the screen or of
    COLUMNS, at most ``WIDEST``.
    """
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)


class Parser(argparse.ArgumentParser):
    """argparse, but an error is a ConfigError of one line that names the nearest flag."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Help, add_help=False, **options)  # type: ignore[arg-type]
        self.short_help: dict[argparse.Action, Flag | None] = {}
        """The flags with a shorter text in the short help; ``None``: the short
        help omits the flag.
        """
        self.add_argument(
            "-h", "--help", action=_ShowHelp, nargs="?", metavar=ALL, default=argparse.SUPPRESS,
            help="print this help; all: of every flag",
        )  # fmt: skip
        self.task_group: argparse._ArgumentGroup | None = None
        """Where the flags of the task belong, in a command that has such; empty
        until they are needed.
        """
        self.task_flags: list[Flag] = []
        """The flags of the task, once they were added."""
        self.names_task = False
        """Whether the arguments, or their config file, name the task."""
        self.takes_command = False
        """True if the words behind ``--`` are a command line, left as it is:
        ``command_line`` of the namespace.
        """

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse all of ``argv``; raises ConfigError for an unknown flag and for a
        missing or unexpected argument.
        """
        command: list[str] = []
        if self.takes_command and "--" in argv:
            at = argv.index("--")
            argv, command = argv[:at], argv[at + 1 :]
        no_task = self._try_task_flags(argv)
        refuse_several(argv, self._option_string_actions, self.task_flags)
        # Not parse_args(): its error for an unknown flag cannot name the nearest one.
        namespace, unknown = self.parse_known_args(argv)
        namespace.argv = argv
        namespace.command_line = command
        if not unknown:
            return namespace
        flag = unknown[0].partition("=")[0]
        kind = "unknown flag" if flag.startswith("-") else "unexpected argument"
        known = self._option_string_actions
        hint = hint_from_other_libraries(flag, known) or nearest(flag, known)
        if no_task and (self.names_task or not hint):
            raise no_task  # it may well be a flag of the task
        asked = f"{self.prog} --help{' --task NAME' * self.names_task}"
        others = dict.fromkeys(
            word.partition("=")[0] for word in unknown[1:] if word.startswith("--")
        )
        others.pop(flag, None)
        also = "".join(
            f", {other!r}{hint_from_other_libraries(other, known) or nearest(other, known)}"
            for other in others
        )
        raise ConfigError(f"{kind} {flag!r}{hint}{also}; {asked} lists the flags")

    def _try_task_flags(self, argv: Sequence[str]) -> DistcoreError | None:
        """Add the flags of the task where help, or a flag that the command has not, asks for them.

        Returns what is wrong where there are none to add.
        """
        flags = [word.partition("=")[0] for word in argv if word.startswith("-")]
        is_help = not {"-h", "--help"}.isdisjoint(flags)
        if not is_help and not any(
            flag.startswith("--") for flag in flags if flag not in self._option_string_actions
        ):
            return None
        try:
            self.add_task_flags(argv)
        except DistcoreError as error:
            if is_help and self.names_task:
                raise
            return error
        return None

    def add_task_flags(self, argv: Sequence[str]) -> None:
        """Add the flags of the task that ``argv`` names, if the command
        has such; raises DistcoreError.
        """
        if self.task_group is None or self.task_flags:
            return
        from distcore.cli.task_flags import add_to, named_task, task_flags

        name = named_task(argv)
        self.names_task = name != "auto"
        added = task_flags(name, self._option_string_actions)
        self.short_help |= add_to(self.task_group, added)
        self.task_flags = added.flags

    def format_short_help(self) -> str:
        """Return the help of the flags that most jobs set, one line for each where that fits."""
        usual = [*self._positionals._group_actions, *self._optionals._group_actions]
        shown = dict.fromkeys(usual) | self.short_help
        full = {action: action.help for action in shown}
        hidden = list(self.short_help.values()).count(None)
        for action, flag in shown.items():
            action.help = (
                _short(flag, help_width() - ShortHelp.COLUMN) if flag else argparse.SUPPRESS
            )
        self.formatter_class = ShortHelp
        self.epilog = f"{self.prog} --help {ALL} explains these in full, and {hidden} more."
        text = re.sub(r"\n\n(?=\S)", "\n", self.format_help())
        self.formatter_class = Help
        self.epilog = None
        for action, said in full.items():
            action.help = said
        return text

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError; argparse calls this for every error that it finds."""
        shown = f"--help {ALL}" if self.short_help else "--help"
        raise ConfigError(f"{message.removeprefix('argument ')} ({self.prog} {shown} explains)")


class _ShowHelp(argparse.Action):
    """Prints the help and ends the program, as argparse's own action, but knows two lengths."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        """Print the short help, or the whole one where there is no other or
        ``all`` was asked for.
        """
        if isinstance(parser, Parser) and parser.short_help and given[1] != ALL:
            print(parser.format_short_help(), end="")
        else:
            parser.print_help()
        parser.exit()


def _short(flag: Flag, room: int) -> str:
    """Return the help of a flag in at most ``room`` characters, cut at the end of a phrase.

    If even the shortest phrase has no room beside the default, the default is left out.
    """
    text, *_ = flag.help.partition("; ")
    default = f" ({flag.default})" if flag.default not in UNSAID else ""
    # An enumeration, which follows a colon, is there whole or not at all.
    phrase, *_ = text.partition(": ")
    ends_of_parts = [match.start() for match in re.finditer(r", | \(", phrase)]
    longest_first = [len(text), len(phrase), *reversed(ends_of_parts)]
    for end in longest_first:
        if end + len(default) <= room:
            return f"{text[:end]}{default}".replace("%", "%%")
    if default:
        return _short(flag._replace(default=""), room)
    shortest = text[: longest_first[-1]]
    return shortest.replace("%", "%%")


class Help(argparse.HelpFormatter):
    """A wide column for flags, so that most have their help on the same line."""

    def __init__(self, prog: str, column: int = 34) -> None:
        super().__init__(prog, max_help_position=column, width=help_width())


class ShortHelp(Help):
    """A narrower column, and no descriptions of groups."""

    COLUMN = 28

    def __init__(self, prog: str) -> None:
        super().__init__(prog, self.COLUMN)

    def add_text(self, text: str | None) -> None:
        """Add the description of the command, and the line at the end."""
        if self._current_section is self._root_section:
            super().add_text(text)

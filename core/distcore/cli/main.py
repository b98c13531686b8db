"""Entry point of the command line. A command's module is imported only when that command runs, to keep help fast."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from distcore.cli.flags import flag_of_others, with_flags
from distcore.errors import ConfigError, DistcoreError, StoppedError, nearest

COMMANDS = {
    "train": "train, evaluate and test a model, on as many ranks as you like",
    "eval": "evaluate a checkpoint, under any strategy",
    "predict": "predict rows without labels, under any strategy",
    "compare": "run one job under several strategies, side by side",
    "checkpoint": "list, check, compare and export checkpoints",
    "check": "measure the laws against a strategy or a task",
    "new": "write the package of a strategy or a task",
    "strategies": "list the installed strategies: what they declare, and their options",
    "tasks": "list the installed tasks: their metrics, and their options",
}
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 done, 2 wrong input, 3 a rank failed, 130 and 143 stopped."""
    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except StoppedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except DistcoreError as error:
        return _fail(with_flags(" ".join(str(error).split())), error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # a bug in distcore or a plugin: one line here, the traceback in a file
        from distcore.cli.tracebacks import write_traceback

        cause = " ".join(f"{type(error).__name__}: {error}".split())
        return _fail(f"{cause} (traceback: {write_traceback(error)})", 3)


def run(argv: list[str]) -> int:
    """Parse the global flags, then import and run the command on the remaining arguments; raises DistcoreError."""
    top = top_parser()
    given = top.parse(argv)
    block(given.block)  # before a command imports any plugin
    if given.command is None:
        top.print_help()
        return 0
    if given.command not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise ConfigError(f"no command named {given.command!r}{nearest(given.command, COMMANDS)} (commands: {known})")
    command = import_module(f"distcore.cli.commands.{given.command}")
    parser = Parser(prog=f"distcore {given.command}", description=COMMANDS[given.command])
    command.add_arguments(parser)
    add_block_flag(parser)
    arguments = parser.parse(given.rest)
    block(arguments.block)
    code: int = command.run(arguments)
    return code


class Parser(argparse.ArgumentParser):
    """argparse, but an error is a ConfigError of one line that names the nearest flag."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **options)  # type: ignore[arg-type]
        self.argv: list[str] = []
        """What is being parsed."""
        self.more_help: Callable[[list[str]], str] | None = None
        """Returns what ``--help`` adds for these arguments."""

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse all of ``argv``; raises ConfigError for an unknown flag and for a missing or unexpected argument."""
        self.argv = argv
        # Not parse_args(): its error for an unknown flag cannot name the nearest one.
        namespace, unknown = self.parse_known_args(argv)
        if not unknown:
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


class _Help(argparse.HelpFormatter):
    """A wide column for flags, so that most have their help on the same line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def top_parser() -> Parser:
    """Return the parser of the arguments up to the command's name."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    top = Parser(
        prog="distcore",
        usage="distcore [-p no:NAME] COMMAND [FLAGS]",
        description="One PyTorch training loop, distributed backends as plugins, the same mathematics under each.",
        epilog=f"commands:\n{commands}\n\ndistcore COMMAND --help explains a command.",
    )
    top.formatter_class = _TopHelp
    top.add_argument("--version", action="version", version=f"distcore {_version()}")
    add_block_flag(top)
    top.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    # Everything after the command is left to the parser of the command.
    top.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return top


class _TopHelp(_Help, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the table of commands."""


def add_block_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``-p no:NAME``, which may stand before or after the command."""
    parser.add_argument(
        "-p", dest="block", metavar="no:NAME", action="append", default=[],
        help="do not load the plugin or distribution NAME; repeatable",
    )  # fmt: skip


def block(given: list[str]) -> None:
    """Block the named plugins in this process and, through the environment, in every rank that it starts.

    ``given``: the values of ``-p``. Raises ConfigError.
    """
    for text in given:
        if not text.startswith("no:") or text == "no:":
            raise ConfigError(f"-p {text}: expected no:NAME, such as -p no:{text}")
    if given:
        from distcore.plugin.registry import BLOCK_VARIABLE

        names = [os.environ.get(BLOCK_VARIABLE, ""), *(text.removeprefix("no:") for text in given)]
        os.environ[BLOCK_VARIABLE] = ",".join(filter(None, names))


def _version() -> str:
    from distcore import __version__

    return __version__


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code

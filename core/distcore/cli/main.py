"""Entry point of the command line. A command's module is imported only when that command runs,
to keep help fast.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shlex
import signal
import sys
import textwrap
from collections.abc import Sequence
from functools import partial

from distcore import __version__
from distcore.cli.commands import command_module, summaries
from distcore.cli.first_line import first_line
from distcore.cli.flags import with_flags
from distcore.cli.parser import Help, Parser, help_width
from distcore.cli.plugin_names import check_names
from distcore.deprecation import print_on_one_line
from distcore.errors import (
    INTERRUPTED,
    ConfigError,
    DistcoreError,
    StoppedError,
    packages_that_do_not_fit,
    raised_at,
    write_traceback,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 done, 2 wrong input, 3 a rank failed, 130,
    141 and 143 stopped.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        print_on_one_line()
    try:
        try:
            return run(given, is_program=argv is None)
        finally:
            # not at the interpreter's exit, where nobody could catch a BrokenPipeError
            sys.stdout.flush()
    except StoppedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except DistcoreError as error:
        message = _with_commands(error, given) if isinstance(error, ConfigError) else str(error)
        return _fail(_with_flags(" ".join(message.split()), given), error.exit_code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a key that is held would interrupt the end
        print(
            "interrupted; nothing was saved" if "train" in given else "interrupted", file=sys.stderr
        )
        return INTERRUPTED
    except Exception as error:
        # A bug in distcore or a plugin: one line here, the traceback in a file.
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            return 141  # 128 + SIGPIPE: the reader has gone, such as ``head``
        if line := packages_that_do_not_fit(error):
            return _fail(f"{line}; traceback in {write_traceback(error)}", 2)
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        return _fail(f"{cause}; traceback in {write_traceback(error)}{raised_at(error)}", 3)


def run(argv: list[str], is_program: bool = False) -> int:
    """Parse the global flags, then import and run the command on the
    remaining arguments; raises DistcoreError.

    ``is_program``: this is a process of its own, which soon prints a line about itself.
    """
    top = top_parser()
    given = top.parse(argv)
    if given.local_rank is not None and "RANK" in os.environ:
        os.environ.setdefault("LOCAL_RANK", str(given.local_rank))
    block(given.block)  # before a command imports any plugin
    if given.command is None:
        top.print_help()
        return 0
    # Not given.rest: argparse drops a -- that begins it.
    rest = argv[argv.index(given.command) + 1 :]
    with first_line(given.command) if is_program else contextlib.nullcontext():
        arguments = command_parser(given.command).parse(rest)
        block(arguments.block)
        check_names(*(vars(arguments).get(kind) for kind in ("strategy", "task", "schedule")))
        code: int = command_module(given.command).run(arguments)
    return code


def command_parser(name: str) -> Parser:
    """Return the parser of the arguments behind a command's name; raises DistcoreError if there
    is no such command.
    """
    module = command_module(name)
    parser = Parser(prog=f"distcore {name}", description=module.SUMMARY)
    module.add_arguments(parser)
    add_block_flag(parser)
    return parser


def _with_commands(error: ConfigError, argv: list[str]) -> str:
    """Return the error's message, with whole commands in place of its remedies, to be copied."""
    if not error.remedies or "train" not in argv:
        return str(error)
    commands = []
    for remedy in error.remedies:
        words = argv
        for flag in remedy:
            words = _without_flag(words, flag)
        for flag, value in remedy.items():
            words = [*words, flag, str(value)]
        commands.append(shlex.join(["distcore", *words]))
    return f"{error.problem}; nearest: {' or: '.join(commands)}"


def _without_flag(argv: list[str], flag: str) -> list[str]:
    """Return a command line without a flag and its value, typed as one word or as two."""
    # Joined by a character that no word can have, so that one pattern matches both.
    joined = "\0".join(argv)
    rest = re.sub(rf"(^|\0){flag}(=|\0)[^\0]*", "", joined)
    return rest.strip("\0").split("\0")


def _with_flags(message: str, argv: list[str]) -> str:
    """Return an error message with the flags of the command in place of config keys."""
    # ``no:NAME``, the value of -p, may stand before the command.
    words = (word for word in argv if not word.startswith("-") and ":" not in word)
    name = next(words, None)
    if name is None:
        return message
    try:
        parser = command_parser(name)
    except DistcoreError:  # the very error that is being printed
        return message
    # Without a task there are no flags of one.
    with contextlib.suppress(DistcoreError):
        parser.add_task_flags(argv)
    return with_flags(message, parser._option_string_actions, argv, parser.task_flags)


def top_parser() -> Parser:
    """Return the parser of the arguments up to the command's name."""
    listed = summaries()
    indent = " " * (max(map(len, listed)) + 4)
    wrap = partial(textwrap.fill, width=help_width(), subsequent_indent=indent)
    rows = []
    for name, text in listed.items():
        first_indent = f"  {name}".ljust(len(indent))
        rows.append(wrap(text, initial_indent=first_indent))
    commands = "\n".join(rows)
    top = Parser(
        prog="distcore",
        usage="distcore [-p no:NAME] COMMAND [FLAGS]",
        description=(
            "One PyTorch training loop, distributed backends as plugins, the same mathematics under"
            " each."
        ),
        epilog=f"commands:\n{commands}\n\ndistcore COMMAND --help explains a command.",
    )
    top.formatter_class = _TopHelp
    top.add_argument("--version", action="version", version=f"distcore {__version__}")
    add_block_flag(top)
    # Some launchers put it before the arguments of a module.
    top.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    top.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    # Everything after the command is left to the parser of the command.
    top.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return top


class _TopHelp(Help):
    """Keeps the line breaks of the table of commands."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("commands:") else super()._fill_text(text, width, indent)


def add_block_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``-p no:NAME``, which may stand before or after the command."""
    parser.add_argument(
        "-p", dest="block", metavar="no:NAME", action="append", default=[],
        help="do not load the plugin or distribution NAME; repeatable",
    )  # fmt: skip


def block(given: list[str]) -> None:
    """Block the named plugins in this process and, through the environment, in every
    rank that it starts.

    ``given``: the values of ``-p``. Raises ConfigError.
    """
    for text in given:
        if not text.startswith("no:") or text == "no:":
            raise ConfigError(f"-p {text}: expected no:NAME, such as -p no:{text}")
    if given:
        from distcore.registry import BLOCK_VARIABLE

        names = [text.removeprefix("no:") for text in given]
        already_blocked = os.environ.get(BLOCK_VARIABLE)
        if already_blocked:
            names.insert(0, already_blocked)
        os.environ[BLOCK_VARIABLE] = ",".join(names)


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _stdout_is_closed() -> bool:
    """Return True if nobody reads stdout any more; then the rest of the output goes nowhere."""
    if not hasattr(select, "poll"):  # Windows
        return True
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # 0: only errors, which are always shown
    is_closed = bool(poll.poll(0))
    if is_closed:
        # The interpreter flushes once more at its exit, which would fail again.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
    return is_closed

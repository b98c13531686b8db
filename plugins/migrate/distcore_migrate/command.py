"""``distcore migrate``: turn the files or the command line of another trainer into a config."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from distcore import ConfigError

SUMMARY = "print the config that does what another trainer's files or command line say"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore migrate [FLAGS] [FILE…] [-- COMMAND LINE]"
    parser.takes_command = True  # type: ignore[attr-defined]
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help=(
            "TrainingArguments as JSON, an accelerate config, a DeepSpeed JSON; several of one job"
            " go together"
        ),
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes of the job, where neither a file nor the command says them",
    )
    parser.add_argument("--out", metavar="FILE", help="write the config there (default: to stdout)")


def run(arguments: argparse.Namespace) -> int:
    """Print the config, and the remarks on stderr. Raises ConfigError, one line."""
    from distcore_migrate import migrate

    if arguments.nproc is not None and arguments.nproc < 1:
        raise ConfigError(f"--nproc {arguments.nproc}: expected a number of processes, 1 or more")
    out = Path(arguments.out) if arguments.out else None
    made = migrate(arguments.files, arguments.command_line, arguments.nproc, out)
    if out is not None:
        texts = {file: "".join(map(_line, rows)) for file, rows in made.rows.items()}
        texts[out] = made.text
        # All before the first is written: a refusal leaves no half of a migration.
        for file in texts:
            _check_is_new(file)
        for file, text in texts.items():
            _write(file, text)
    else:
        print(made.text, end="")
    if made.choices:
        print(
            f"said by no source: {', '.join(made.choices)}; the config does not train before",
            file=sys.stderr,
        )
    if made.no_equal:
        print(f"no equal here: {'; '.join(made.no_equal)}", file=sys.stderr)
    if made.instead:
        print(
            f"asked for in another way here: {'; '.join(made.instead)}; the file says how",
            file=sys.stderr,
        )
    if made.start:
        print(
            f"start it by: distcore train {arguments.out or 'FILE'} {shlex.join(made.start)}",
            file=sys.stderr,
        )
    if count := len(made.differs):
        means = "things mean" if count > 1 else "thing means"
        print(f"{count} {means} something else; the comments of the file say what", file=sys.stderr)
    return 0


def _line(row: dict[str, Any]) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def _check_is_new(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"--out {file}: is there already; remove it, or name another file")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: cannot be written: {error.strerror}") from None

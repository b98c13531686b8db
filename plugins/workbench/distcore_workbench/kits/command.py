"""The laws of a command: ``distcore check --command NAME``."""

from __future__ import annotations

import inspect
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from distcore import ConfigError
from distcore.registry import load
from distcore.testing import Measured, Suite, needs, none_of

LONGEST = 90
"""Characters of a summary: a line of the help."""
QUICK = 1.0
"""Seconds of CPU that a help may take; that of distcore's own commands takes 0.1."""
LIMIT = 60.0
WATCHED = """
import atexit, runpy, sys
atexit.register(lambda: print("torch imported:", "torch" in sys.modules, file=sys.stderr))
runpy.run_module("distcore", run_name="__main__")
"""
"""Runs the command line, and then says whether it has imported torch."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    status: int
    """Its exit status."""
    out: str
    """What it printed."""
    err: str
    """What it said on stderr."""
    left: list[str]
    """Names of what it left in its empty folder."""

    def faults(self) -> list[str]:
        """Return what is wrong with it as the answer to words that it cannot take."""
        *_, last_line = ["", *self.err.strip().splitlines()]
        wrong = []
        if self.status != 2:
            wrong.append(f"exit status {self.status}")
        if not last_line.startswith("error: ") or "Traceback" in self.err:
            wrong.append(last_line or "no line")
        return wrong + [f"left {name}" for name in self.left]


@dataclass
class CommandLab:
    """The command, and the folder in which it runs."""

    name: str
    """Of its entry point."""
    module: ModuleType
    """With ``SUMMARY``, ``add_arguments`` and ``run``."""
    folder: Path
    """For empty folders."""
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases that the command declares not to keep, with reasons."""
        declared: Mapping[str, str] = getattr(self.module, "exempt", {})
        return declared

    def run(self, *words: str) -> Ended:
        """Run ``distcore NAME`` with further words in a new and empty folder."""
        here = self.folder / str(next(self._numbers))
        here.mkdir()
        command = [sys.executable, "-c", WATCHED, self.name, *words]
        run = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        # The line of ``WATCHED`` is not the command's own.
        errors, _, _ = run.stderr.rpartition("torch imported:")
        left = sorted(path.name for path in here.iterdir())
        return Ended(status=run.returncode, out=run.stdout, err=errors, left=left)


def command_lab(name: str, settings: Mapping[str, Any], folder: Path) -> CommandLab:
    """Return the lab of an installed command; raises DistcoreError if it does not import."""
    module = load("commands", name)
    missing = [part for part in ("SUMMARY", "add_arguments", "run") if not hasattr(module, part)]
    if missing:
        raise ConfigError(
            f"command {name!r}: its module has no {missing[0]}; it needs SUMMARY, add_arguments"
            " and run"
        )
    return CommandLab(name, module, folder)


SUITE = Suite("command", command_lab)


@SUITE.law("surprise")
def summary_is_read(lab: CommandLab) -> Measured:
    """``SUMMARY`` is a text on one line, which ``distcore --help`` reads without an import."""
    match = re.search(r'^SUMMARY = "(.*)"$', inspect.getsource(lab.module), re.M)
    text = match[1] if match else ""
    wrong = []
    if not text or text != lab.module.SUMMARY:
        wrong.append(f"{text!r} for {lab.module.SUMMARY!r}")
    if len(text) > LONGEST:
        wrong.append(f"{len(text)} characters")
    return none_of(wrong, "summary", f'write SUMMARY = "up to {LONGEST} characters"')


@SUITE.law("surprise")
def help_without_torch(lab: CommandLab) -> Measured:
    """The help works, leaves nothing, and does not import torch."""
    command = [sys.executable, "-c", WATCHED, lab.name, "--help"]
    run = subprocess.run(
        command, cwd=lab.folder, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    *_, last_line = ["", *run.stderr.strip().splitlines()]
    wrong = []
    if run.returncode != 0:
        wrong.append(f"exit status {run.returncode}: {last_line}")
    if "torch imported: True" in last_line:
        wrong.append("torch is imported")
    # The folders are those of other laws.
    wrong += [f"left {path.name}" for path in lab.folder.iterdir() if path.is_file()]
    return none_of(wrong, "help", "import torch and others inside run()")


@SUITE.law("surprise")
def help_is_quick(lab: CommandLab) -> Measured:
    """The help takes little time."""
    before = _cpu_of_children()
    lab.run("--help")
    taken = _cpu_of_children() - before
    return Measured(
        error=taken, bound=QUICK, note="seconds of CPU; import what is slow inside run()"
    )


@SUITE.law("agreement")
def flags_have_help(lab: CommandLab) -> Measured:
    """Each flag says what it does."""
    lines = lab.run("--help", "all").out.splitlines()
    silent = []
    for line, next_line in pairwise([*lines, ""]):
        entry = re.match(r"  (-\S.*?)(?:  +(\S.*))?$", line)
        # argparse begins the text of a long flag on the next line.
        has_text_below = next_line.startswith(" " * 6)
        if entry and not entry[2] and not has_text_below:
            silent.append(entry[1])
    return none_of(silent, "without a text in the help", "give help= to add_argument")


@SUITE.law("agreement")
def unknown_flag(lab: CommandLab) -> Measured:
    """An unknown flag is one line that begins with ``error:``, and exit status 2."""
    return none_of(
        lab.run("--no-such-flag").faults(), "answer to --no-such-flag", "leave flags to the parser"
    )


@SUITE.law("agreement")
def wrong_word(lab: CommandLab) -> Measured:
    """A word that names nothing is one line, ``error: …``, and exit status 2; it leaves nothing."""
    faults = lab.run("/no/such/word").faults()
    return none_of(
        faults, "answer to the word /no/such/word", "raise ConfigError: what is wrong, what to do"
    )


@SUITE.law("evaluation")
def example_works(lab: CommandLab) -> Measured:
    """The words of ``EXAMPLE`` end with exit status 0, and ``run`` returns it as a number."""
    ended = lab.run(*_example(lab))
    wrong = []
    if ended.status != 0:
        wrong.append(f"exit status {ended.status}: {ended.err.strip()[-200:]}")
    # None as an exit status is 0, also after a failure.
    if inspect.signature(lab.module.run).return_annotation in (None, "None"):
        wrong.append("run() has no return of an int")
    return none_of(wrong, "example", "return 0 from run()")


@SUITE.law("evaluation")
def plain_in_a_pipe(lab: CommandLab) -> Measured:
    """Into a pipe the command prints text without escape sequences."""
    out = lab.run(*_example(lab)).out
    wrong = [repr(line) for line in out.splitlines() if "\x1b" in line]
    return none_of(
        wrong, "lines with escape sequences", "print by print(), or by the tables of distcore.cli"
    )


def _example(lab: CommandLab) -> tuple[str, ...]:
    """Return the words of the module's example; without one the law is skipped."""
    needs(
        hasattr(lab.module, "EXAMPLE"),
        'the module declares no EXAMPLE = ("word", ...) that works in an empty folder',
    )
    return tuple(lab.module.EXAMPLE)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

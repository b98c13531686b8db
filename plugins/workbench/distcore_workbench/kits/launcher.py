"""The laws of a launcher: ``distcore check --launcher NAME``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil

from distcore import ConfigError
from distcore.launchers import Command, Host, LaunchPlan
from distcore.registry import load
from distcore.testing import Measured, Suite, needs, none_of
from distcore_workbench.kits import points
from distcore_workbench.kits.launcher_lab import (
    VARIABLES,
    WORDS,
    LauncherLab,
    launcher_lab,
    texts_of,
)

CHANGED: dict[str, Any] = {
    "value": "elsewhere:1234",
    "nodes": (3, 3),
    "nproc": 5,
    "hosts": (Host(name="one.example", slots=2), Host(name="other.example", slots=2)),
    "log_dir": "/logs",
    "bind_cores": "0-3",
    "environment": VARIABLES,
}
"""By field of a request: a value that must be in the plan, or be refused."""
ODD = (":", "a b", "::1:x", "-1", "=", "x,y=", "*")
LIMIT = 60.0
REFUSED = "the launcher refused: "

SUITE = Suite("launcher", launcher_lab)


@SUITE.law("agreement")
def answers_a_plan(lab: LauncherLab) -> Measured:
    """``plan`` returns a LaunchPlan of files, or of commands with arguments that are texts."""
    plan = lab.plan()
    if not isinstance(plan, LaunchPlan):
        remedy = "return LaunchPlan(commands=(Command(words=...),))"
        return none_of([type(plan).__name__], "answer", remedy)
    wrong_commands = []
    wrong_words = []
    for command in plan.commands:
        if not isinstance(command, Command) or not command.words:
            wrong_commands.append(repr(command))
        wrong_words += [repr(word) for word in command.words if not isinstance(word, str)]
    wrong = [*wrong_commands, *wrong_words]
    if not plan.commands and not plan.files:
        wrong.append("no command and no file")
    return none_of(wrong, "in the plan", "give at least one Command, with words of text")


@SUITE.law("agreement")
def every_argument(lab: LauncherLab) -> Measured:
    """The arguments of ``distcore train`` reach the ranks unchanged, whatever shell is between."""
    texts = set(texts_of(lab.plan()))
    missing = [word for word in dict.fromkeys(WORDS) if word not in texts]
    return none_of(
        missing,
        "arguments that no command has",
        "start with train_command(spec); quote by shlex.join",
    )


@SUITE.law("agreement")
def every_variable(lab: LauncherLab) -> Measured:
    """The variables of the request reach the ranks with their values."""
    plan = lab.plan(environment=VARIABLES)
    texts = set(texts_of(plan))
    set_by_commands: set[tuple[str, str]] = set()
    for command in plan.commands:
        set_by_commands.update(command.environment.items())
    missing = []
    for name, value in VARIABLES.items():
        # As one word, as two words of a command line, or in a file.
        is_written = f"{name}={value}" in texts or {name, value} <= texts
        if not is_written and (name, value) not in set_by_commands:
            missing.append(name)
    return none_of(
        missing,
        "variables that no rank gets",
        "start with rank_variables(spec); quote by shlex.quote",
    )


@SUITE.law("agreement")
def nothing_is_ignored(lab: LauncherLab) -> Measured:
    """Whatever a user asks for is in the plan or refused: no flag is without effect."""
    usual = lab.plan()
    ignored = []
    for name, value in CHANGED.items():
        with suppress(ConfigError):
            if lab.plan(**{name: value}) == usual:
                ignored.append(f"{name} = {value!r}")
    return none_of(
        ignored, "without effect", "use it, or refuse it: refuse(name, {flag: value}, what to do)"
    )


@SUITE.law("agreement")
def refuses_in_one_line(lab: LauncherLab) -> Measured:
    """What cannot be planned is a ConfigError of one line that names a flag."""
    requests: list[dict[str, Any]] = [{"value": value} for value in ODD]
    requests += [{name: value} for name, value in CHANGED.items()]
    wrong = []
    for changes in requests:
        try:
            lab.plan(**changes)
        except ConfigError as error:
            text = str(error)
            if "--" not in text or "\n" in text:
                wrong.append(f"{changes}: {text}")
        except Exception as error:  # of the launcher
            wrong.append(f"{changes}: {type(error).__name__}: {error}")
    return none_of(
        wrong, "errors", "raise ConfigError('--launcher NAME: what is wrong; what to do')"
    )


@SUITE.law("order")
def same_plan_again(lab: LauncherLab) -> Measured:
    """A plan depends on the request alone, not on the process's folder and variables."""
    plan = lab.plan()
    # A variable may be a secret, which a script would show to others.
    with _elsewhere(lab.folder):
        other = load("launchers", lab.name)().plan(lab.spec)
    names = [field.name for field in fields(LaunchPlan)]
    wrong = [name for name in names if getattr(plan, name) != getattr(other, name)]
    return none_of(wrong, "differ elsewhere", "read spec.here, not os.environ or os.getcwd()")


@SUITE.law("surprise")
def plans_only(lab: LauncherLab) -> Measured:
    """``plan`` writes nothing and starts nothing: ``--dry-run`` prints it."""
    before = _written(lab.folder)
    others = psutil.Process().children()  # such as those of a notebook
    variables = dict(os.environ)
    here = Path.cwd()
    os.chdir(lab.folder)
    try:
        lab.plan()
    finally:
        os.chdir(here)
    wrong = [f"wrote {path.name}" for path, _ in _written(lab.folder) - before]
    started = [child for child in psutil.Process().children() if child not in others]
    wrong += [f"started {child.name()}" for child in started]
    if dict(os.environ) != variables:
        wrong.append("changed os.environ")
    return none_of(sorted(wrong), "in plan()", "put texts in LaunchPlan.files; start in run()")


@SUITE.law("resume")
def starts_ranks(lab: LauncherLab) -> Measured:
    """``run`` starts the ranks, and its exit status is 0 when they have trained."""
    status, last_line, out = _run(lab, "well")
    report = out / "report.json"
    ranks = json.loads(report.read_text())["world_size"] if report.is_file() else 0
    wrong = []
    # Two processes that do not meet train alone, each with success.
    if status != 0 or ranks != 2:
        wrong.append(f"exit status {status}, {ranks} ranks trained: {last_line}")
    return none_of(wrong, "run of two ranks", "start spec.train as train_command(spec) says")


@SUITE.law("agreement")
def says_that_ranks_failed(lab: LauncherLab) -> Measured:
    """The exit status is another one than 0 if the ranks failed."""
    status, last_line, _ = _run(lab, "badly", "--set", "task_options.fails=true")
    wrong = [] if status else [last_line or "no word"]
    return none_of(wrong, "exit status 0 of ranks that failed", "return theirs")


def start(name: str, spec: str) -> int:
    """Plan and run a request in this process, which the launcher may replace."""
    lab = LauncherLab(name, json.loads(spec), Path.cwd())
    try:
        return lab.launcher.run(lab.plan())
    except ConfigError as error:  # such as an engine that is not there
        print(f"{REFUSED}{error}", file=sys.stderr)
        return 2


def _run(lab: LauncherLab, run: str, *more: str) -> tuple[int, str, Path]:
    """Train on two ranks in a new process; return exit status, last line and run folder.

    Skips without the programs.
    """
    needs(not lab.spec.hosts, "it starts ranks on other machines")
    needs(bool(lab.plan().commands), "it writes files, and starts nothing")
    out = lab.folder / run
    train = [
        "--task",
        f"{points.__file__}:Points",
        "--max-steps",
        "2",
        "--set",
        "device=cpu",
        "--out",
        str(out),
        *more,
    ]
    train += ["--strategy", "ddp", "--global-batch-size", "8"]
    request = json.dumps({**lab.settings, "train": train})
    code = (
        "import sys; from distcore_workbench.kits.launcher import start;"
        " sys.exit(start(*sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, lab.name, request],
        cwd=lab.folder, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    last_line = (done.stderr.strip().splitlines() or [""])[-1]
    needs(not last_line.startswith(REFUSED), last_line.removeprefix(REFUSED))
    return done.returncode, last_line, out


def _written(folder: Path) -> set[tuple[Path, int]]:
    """Return the files in a folder, with the times of their last change."""
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@contextmanager
def _elsewhere(folder: Path) -> Iterator[None]:
    """Inside, the process has another folder and another variable."""
    here = Path.cwd()
    os.chdir(folder)
    os.environ["KIT_TOKEN"] = "secret"
    try:
        yield
    finally:
        os.chdir(here)
        del os.environ["KIT_TOKEN"]

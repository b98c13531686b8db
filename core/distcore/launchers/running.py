"""How plans are run: files are written, and one command takes the place of this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from distcore.errors import ConfigError
from distcore.launchers.contract import LaunchPlan


def check_programs(plan: LaunchPlan) -> None:
    """Raise ConfigError, one line, unless every program of the plan is on this machine."""
    for command in plan.commands:
        program = command.words[0]
        if shutil.which(program) is None:
            raise ConfigError(f"no program {program!r} on PATH; --dry-run prints what would be started")


def write_files(files: Mapping[str, str]) -> None:
    """Write the texts of a plan; raises ConfigError."""
    for path, text in files.items():
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def run_command(plan: LaunchPlan) -> int:
    """Run a plan of one command, which takes the place of this process: signals and exit status are its own.

    Raises ConfigError, one line, if its program is missing or a file cannot be written.
    """
    (command,) = plan.commands
    check_programs(plan)
    write_files(plan.files)
    os.execvpe(command.words[0], command.words, {**os.environ, **command.environment})

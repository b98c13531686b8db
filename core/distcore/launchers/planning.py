"""Common parts of launchers' plans: the command of a rank, its variables, and refusals; and
how plans are run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from distcore.errors import ConfigError
from distcore.launchers.contract import Host, LaunchPlan, LaunchSpec
from distcore.launchers.processes.binding import BIND_VARIABLE
from distcore.launchers.processes.log_files import LOG_DIR_VARIABLE

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
ENV_FILE = ".distcore.env"
"""In the current folder or else the home folder: lines of NAME=VALUE."""
FORWARDED = re.compile(
    r"(DISTCORE|GLOO|MKL|NCCL|OMP|TORCH|TRANSFORMERS|UCX)_\w+|HF_(?!TOKEN)\w+|PYTHON\w+|LD_LIBRARY_PATH"
)
"""Names of the caller's variables that go to other machines; the rest stays: it speaks of this
machine or is secret.
"""


def train_command(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the command of a rank that the launcher's engine starts: Python,
    ``-m``, ``distcore``, its arguments.
    """
    # Not --nproc: torchrun would take it for an abbreviation of two flags of its own.
    # they are the engine's business
    restarts = ("--set", "max_restarts=0") if spec.max_restarts else ()
    # Who starts the launcher has set the earlier run aside; a rank that comes back must not set
    # aside its own.
    overwrite = ("--set", "overwrite=false") if spec.overwrite else ()
    return (
        spec.here.python,
        "-m",
        "distcore",
        "train",
        *spec.train,
        "--set",
        "nproc=auto",
        *restarts,
        *overwrite,
    )


def rank_variables(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables of every rank, in addition to the caller's."""
    logs = {LOG_DIR_VARIABLE: spec.log_dir} if spec.log_dir else {}
    cores = {BIND_VARIABLE: spec.bind_cores} if spec.bind_cores else {}
    return {**spec.environment, **logs, **cores}


def gpus_of(host: Host | None) -> dict[str, str]:
    """Return the variable for the chosen GPUs of ``host``, in their order."""
    return (
        {}
        if host is None or host.chosen is None
        else {GPUS_VARIABLE: ",".join(map(str, host.chosen))}
    )


def only_host(name: str, spec: LaunchSpec) -> Host | None:
    """Return the machine of a launcher that starts ranks here; raises ConfigError for several."""
    if spec.hosts and len(spec.hosts) > 1:
        names = ", ".join(host.name for host in spec.hosts)
        raise ConfigError(
            f"--launcher {name} starts ranks here, not on {names}; --launcher ssh starts them there"
        )
    return spec.hosts[0] if spec.hosts else None


def refuse(name: str, given: Mapping[str, object], instead: str) -> None:
    """Raise ConfigError for the first flag in ``given`` with a value; ``instead`` is the remedy."""
    for flag, value in given.items():
        if value:
            raise ConfigError(f"--launcher {name} takes no {flag}: {instead}")


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environ`` that ranks on other machines get, too."""
    return {name: environ[name] for name in sorted(environ) if FORWARDED.fullmatch(name)}


def settings(given: Iterable[str], folders: Iterable[Path]) -> dict[str, str]:
    """Return the variables of the first ``.distcore.env`` in ``folders``, overridden
    by those of ``--env``.

    Raises ConfigError for a line other than NAME=VALUE.
    """
    variables: dict[str, str] = {}
    paths = (folder / ENV_FILE for folder in folders)
    file = next((path for path in paths if path.is_file()), None)
    if file is not None:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            text = line.strip()
            if text and not text.startswith("#"):
                # A line may be one of a shell, too.
                variables |= _pair(text.removeprefix("export "), f"{file}, line {number}")
    for text in given:
        variables |= _pair(text, "--env")
    return variables


def _pair(text: str, where: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(f"{where}: {text!r}: expected NAME=VALUE")
    return {name: value}


def check_programs(plan: LaunchPlan) -> None:
    """Raise ConfigError, one line, unless every program of the plan is on this machine."""
    for command in plan.commands:
        program = command.words[0]
        if shutil.which(program) is None:
            raise ConfigError(
                f"no program {program!r} on PATH; --dry-run prints what would be started"
            )


def write_files(files: Mapping[str, str]) -> None:
    """Write the texts of a plan; raises ConfigError."""
    for path, text in files.items():
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def run_command(plan: LaunchPlan) -> int:
    """Run a plan of one command, which takes the place of this process: signals and exit
    status are its own.

    Raises ConfigError, one line, if its program is missing or a file cannot be written.
    """
    (command,) = plan.commands
    check_programs(plan)
    write_files(plan.files)
    program, *_ = command.words
    environment = {**os.environ, **command.environment}
    os.execvpe(program, command.words, environment)

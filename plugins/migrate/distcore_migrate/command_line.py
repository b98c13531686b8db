"""A command line: environment, the programs that start ranks, the script, and its arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from distcore import ConfigError, nearest
from distcore_migrate.draft import Tree
from distcore_migrate.flag_parsing import is_flag, parse_flags
from distcore_migrate.launcher_flags import NAMES, PROGRAMS
from distcore_migrate.library_commands import (
    job_of_library,
    lightning_job,
    llama_factory_job,
    with_file,
)
from distcore_migrate.scripts import SCRIPTS, Script
from distcore_migrate.sources import read_tree

WRAPPERS = {
    "nohup": 0,
    "time": 0,
    "env": 0,
    "exec": 0,
    "sudo": 0,
    "uv": 1,
    "poetry": 1,
    "pdm": 1,
    "pipenv": 1,
}
"""Programs that only run another one, with the words of theirs that follow: ``uv run``."""
SHELLS = ("bash", "sh", "zsh")
ENDS = re.compile(r"&|\||;|&&|\d?>>?.*")
"""Words of a shell behind a command."""
STARTS = re.compile(r"\.py\b|\s-m\s|torchrun|deepspeed|accelerate")
"""Part of a shell's command that starts a training."""
INSTEAD = {
    "zero_to_fp32": "distcore checkpoint export RUN --to DIR writes whole weights at every stage",
    "xla_spawn": "there is no XLA here; --device takes what torch.accelerator sees",
    "ds_report": "distcore strategies says what is installed and can work here",
}
"""Map each script that trains nothing to its replacement here."""
HINT = "known programs are python, torchrun, accelerate launch, deepspeed, horovodrun, mpirun, srun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The parts of a command line."""

    environment: Tree
    """Variables that were set before the command."""
    launchers: tuple[tuple[str, Tree], ...]
    """The programs that start ranks, from outside in, each with its flags."""
    name: str
    """Name of the script, without folder and suffix; of a module its last part."""
    script: Script | None
    """Facts about the script; ``None``: it is unknown."""
    arguments: Tree = field(default_factory=dict)
    """Its arguments."""

    def flags_of(self, program: str) -> Tree | None:
        """Return the flags of a program of the command, or ``None`` if it is not there."""
        return next((flags for name, flags in self.launchers if name == program), None)


def parse(words: Sequence[str]) -> Command:
    """Cut a command into its parts; raises ConfigError, one line, for an unknown program."""
    rest = _by_name([word for word in words if word.strip()])
    # A redirection or a further command: neither is an argument of the script.
    ends = [index for index, word in enumerate(rest) if index and ENDS.fullmatch(word)]
    rest = rest[: min(ends, default=None)]
    environment: Tree = {}
    launchers: list[tuple[str, Tree]] = []
    while True:
        _skip_wrappers(rest, environment)
        if not rest:
            start = " ".join(list(words)[:6])
            raise ConfigError(
                f"command {start!r}: names no script, a word that ends in .py, or a module"
            )
        if rest[1:2] == ["fit"] and (fitted := lightning_job(rest)):
            return Command(environment=environment, launchers=tuple(launchers), **fitted)
        if rest[0].endswith(".py"):
            target, arguments = Path(rest[0]).stem, rest[1:]
            break
        if library := job_of_library(rest, environment):
            return Command(
                environment=environment,
                launchers=(*launchers, *library.pop("launchers", ())),
                **library,
            )
        word, module = rest[0], ""
        if re.fullmatch(r"python[\d.]*", Path(word).name):
            module, rest = _python(rest[1:])
            if not module:
                continue
        program = _program(module or Path(word).name)
        if program is None and module:
            target, arguments = module.rpartition(".")[2], rest
            break
        if program is None:
            raise ConfigError(f"command {word!r}: not known{nearest(word, PROGRAMS)}; {HINT}")
        rest = rest if module else rest[1:]
        if program == "accelerate" and rest[:1] == ["launch"]:
            rest = rest[1:]
        flags, rest = PROGRAMS[program].flags.cut(rest)
        launchers.append((program, flags))
        if (flags.get("module") or flags.get("m")) and rest:
            target, arguments = rest[0].rpartition(".")[2], rest[1:]
            break
    if target in ("train", "train_bash") and (job := llama_factory_job(arguments)):
        return Command(environment=environment, launchers=tuple(launchers), **job)
    if target in INSTEAD:
        raise ConfigError(f"script {target}.py: {INSTEAD[target]}")
    return Command(
        environment=environment,
        launchers=tuple(launchers),
        name=target,
        script=SCRIPTS.get(target),
        arguments=_arguments(arguments, target in SCRIPTS),
    )


def _by_name(words: list[str]) -> list[str]:
    """Return the words with Axolotl's module, which starts as ``-m
    axolotl.cli.train``, as its command.
    """
    for index, (flag, module) in enumerate(pairwise(words)):
        if flag in ("-m", "--module") and module.startswith("axolotl.cli"):
            return [*words[:index], "axolotl", "train", *words[index + 2 :]]
    return words


def _program(name: str) -> str | None:
    program = NAMES.get(name, name)
    return program if program in PROGRAMS and program != "python" else None


def _skip_wrappers(rest: list[str], environment: Tree) -> None:
    """Remove all words before the program: variables, wrappers and a shell's ``-c``."""
    while rest:
        if match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", rest[0], re.DOTALL):
            environment[match[1]] = match[2]
            rest.pop(0)
        elif (name := Path(rest[0]).name) in WRAPPERS:
            del rest[: 1 + WRAPPERS[name]]
            while rest and is_flag(rest[0]):
                rest.pop(0)
        elif name in ("numactl", "taskset"):
            rest.pop(0)
            arguments: list[str] = []
            while rest and not _starts_program(rest[0]):
                arguments.append(rest.pop(0))
            environment[name] = " ".join(arguments)
        elif name in SHELLS and len(rest) > 2 and re.fullmatch(r"-.*c", rest[1], re.DOTALL):
            commands = re.split(r"&&|;|\n", rest[2])
            # The others change the folder, load modules, or write messages.
            starts = [command for command in commands if STARTS.search(command)]
            rest[:] = shlex.split((starts or commands)[-1])
        else:
            return


def _starts_program(word: str) -> bool:
    """Return True for a script, Python or a launcher, after a wrapper's own arguments."""
    name = Path(word).name
    is_python = re.fullmatch(r"python[\d.]*", name) is not None
    return word.endswith(".py") or is_python or _program(name) is not None


def _python(words: list[str]) -> tuple[str, list[str]]:
    """Return the module that the interpreter starts, or nothing, and the words from the script
    or behind the module.
    """
    rest = list(words)
    while rest and is_flag(rest[0]):
        word = rest.pop(0)
        if word == "-m" and rest:
            return rest[0], rest[1:]
        if word in ("-W", "-X") and rest:
            rest.pop(0)
    return "", rest


def _arguments(words: list[str], is_known: bool) -> Tree:
    """Return a script's arguments by name; a known script takes a file of them, too."""
    is_file = len(words) == 1 and Path(words[0]).suffix in (".json", ".yaml", ".yml")
    if is_known and is_file:
        return read_tree(words[0])
    if is_known:
        return with_file(parse_flags(words))
    flags = [index for index, word in enumerate(words) if is_flag(word)]
    first_flag = min(flags, default=len(words))
    arguments = parse_flags(words[first_flag:])
    if first_flag:
        # Words without a flag, of a script of the user's own.
        arguments[""] = " ".join(words[:first_flag])
    return arguments

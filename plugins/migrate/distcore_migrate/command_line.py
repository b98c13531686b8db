"""A command line: environment, launcher, script and its arguments, each read by its own table."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distcore import ConfigError, nearest
from distcore_migrate.draft import Draft, Rule, Tree, apply, fact, no_effect, none, to, whole, written
from distcore_migrate.scripts import SCRIPTS, Script

MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Modules that ``python -m`` starts as a launcher."""
ONE_EACH = "one process per device; --nproc N says how many these are"
LAUNCHER = no_effect("only matters to the launcher; ranks are started by --nproc, or by a launcher as before")


def _ranks(draft: Draft, name: str, value: Any) -> None:
    if str(value) in ("gpu", "auto", "cpu"):
        draft.note("open", written(name, value), ONE_EACH)
        draft.keep("kind", "ddp", name)
    else:
        draft.keep("processes_here", whole(value), name)


def _included(draft: Draft, name: str, value: Any) -> None:
    devices = [part for part in str(value).partition(":")[2].split(",") if part]
    if "@" in str(value) or not devices:
        draft.note("none", written(name, value), "give --nproc, the ranks on this machine")
    else:
        draft.keep("processes_here", len(devices), name)


def _devices(draft: Draft, name: str, value: Any) -> None:
    draft.note("idle", written(name, value), "set it again where distcore train runs; --nproc auto is one rank per GPU")


TORCHRUN_ROWS: dict[str, Rule] = {
    "nproc_per_node": _ranks,
    "nnodes": fact("machines"),
    "max_restarts": to("max_restarts", whole),
    "use_env": LAUNCHER,
} | dict.fromkeys(
    ("standalone", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port",
     "monitor_interval", "start_method", "role", "module", "no_python", "run_path", "log_dir", "redirects", "tee",
     "local_addr", "local_ranks_filter", "logs_specs", "numa_binding", "signals_to_handle", "event_log_handler",
     "shutdown_timeout", "virtual_local_rank", "duplicate_stdout_filters", "duplicate_stderr_filters"),
    LAUNCHER,
)  # fmt: skip
"""Flags of torchrun."""
DEEPSPEED_ROWS: dict[str, Rule] = {
    "num_gpus": _ranks,
    "num_accelerators": _ranks,
    "num_nodes": fact("machines", whole),
    "include": _included,
    "i": _included,
    "exclude": none("give --nproc, the ranks on this machine"),
    "e": none("give --nproc, the ranks on this machine"),
    "autotuning": none("--sweep is a grid of runs"),
    "elastic_training": none("a checkpoint goes on at any number of ranks"),
} | dict.fromkeys(
    ("hostfile", "H", "master_port", "master_addr", "node_rank", "launcher", "launcher_args", "module", "no_python",
     "no_local_rank", "no_ssh", "no_ssh_check", "ssh_port", "force_multi", "save_pid", "enable_each_rank_log",
     "bind_cores_to_rank", "bind_core_list", "venv_script", "log_level", "q", "quiet", "min_elastic_nodes",
     "max_elastic_nodes"),
    LAUNCHER,
)  # fmt: skip
"""Flags of DeepSpeed's launcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The parts of a command line."""

    environment: Tree
    """Variables that were set before the command."""
    launcher: str
    """``python``, ``torchrun``, ``accelerate`` or ``deepspeed``."""
    launcher_flags: Tree
    """Its flags, with underscores."""
    name: str
    """Name of the script, without folder and suffix."""
    script: Script
    """What is known of it."""
    arguments: Tree = field(default_factory=dict)
    """Its arguments."""


def parse(words: Sequence[str]) -> Command:
    """Cut a command into its parts; raises ConfigError, one line, for a launcher or script that is not known."""
    rest = [word for word in words if word.strip()]
    environment: Tree = {}
    while rest and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", rest[0])):
        environment[found[1]] = found[2]
        rest.pop(0)
    at = next((place for place, word in enumerate(rest) if word.endswith(".py")), None)
    if at is None:
        raise ConfigError(f"command {' '.join(rest[:6])!r}: names no script, a word that ends in .py")
    launcher, flags = _launcher(rest[:at])
    name = Path(rest[at]).stem
    if name not in SCRIPTS:
        raise ConfigError(
            f"script {rest[at]}: not known{nearest(name, SCRIPTS)}; known are {', '.join(SCRIPTS)}. Of another, give "
            "the JSON that its TrainingArguments.to_json_string() prints"
        )
    arguments = _arguments(rest[at + 1 :])
    return Command(
        environment=environment, launcher=launcher, launcher_flags=flags, name=name, script=SCRIPTS[name],
        arguments=arguments,
    )  # fmt: skip


def _launcher(words: list[str]) -> tuple[str, Tree]:
    if not words:
        return "python", {}
    program, rest = Path(words[0]).name, words[1:]
    if re.fullmatch(r"python[\d.]*", program):
        if "-m" not in rest:
            return "python", parse_flags(rest)
        at = rest.index("-m")
        module = rest[at + 1] if at + 1 < len(rest) else ""
        if module not in MODULES:
            raise ConfigError(f"python -m {module}: no launcher that is known ({', '.join(MODULES)})")
        return MODULES[module], parse_flags(rest[at + 2 :])
    if program == "accelerate":
        return "accelerate", parse_flags(rest[1:] if rest[:1] == ["launch"] else rest)
    if program in ("torchrun", "deepspeed"):
        return program, parse_flags(rest)
    known = "python, torchrun, accelerate launch, deepspeed"
    raise ConfigError(f"command {program!r}: not known ({known}); of another, give what it starts, and --nproc")


def _arguments(words: list[str]) -> Tree:
    if len(words) == 1 and Path(words[0]).suffix in (".json", ".yaml", ".yml"):
        from distcore_migrate.sources import read_tree

        return read_tree(words[0])
    return parse_flags(words)


def parse_flags(words: Sequence[str]) -> Tree:
    """Return flags with their values: several words make a list, none means true; raises ConfigError."""
    flags: Tree = {}
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if not _is_flag(word):
            if not name:
                raise ConfigError(f"argument {word!r}: expected a flag such as --learning_rate")
            values.append(word)
            continue
        if name:
            parsed = [_value(text) for text in values]
            flags[name] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
        given, equals, value = word.lstrip("-").partition("=")
        name, values = given.replace("-", "_"), [value] if equals else []
    return flags


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\.?\d.*", word)


def _value(text: str) -> Any:
    """Return a word as what it says: a number, a truth value, a tree; otherwise the word."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        return json.loads(text) if text not in ("NaN", "Infinity", "-Infinity") else text
    except ValueError:
        pass
    try:
        return float(text) if re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text, re.IGNORECASE) else text
    except ValueError:
        return text


def read_launcher(draft: Draft, command: Command) -> None:
    """Put what the launcher was told into ``draft``; Accelerate's flags are read with its file."""
    if command.launcher == "torchrun":
        apply(draft, TORCHRUN_ROWS, command.launcher_flags, "torchrun")
        if "nproc_per_node" not in command.launcher_flags:
            draft.keep("processes_here", 1, "nproc_per_node (default)")
    elif command.launcher == "deepspeed":
        apply(draft, DEEPSPEED_ROWS, command.launcher_flags, "deepspeed")
        if not command.launcher_flags.keys() & {"num_gpus", "num_accelerators", "include", "i"}:
            draft.note("open", "deepspeed without --num_gpus", ONE_EACH)
            draft.keep("kind", "ddp", "deepspeed")
    elif command.launcher == "python":
        for name in command.launcher_flags:
            draft.note("idle", f"python -{name}", "for the interpreter")
    for name, value in command.environment.items():
        _devices(draft, name, value)
    _multiply(draft)


def _multiply(draft: Draft) -> None:
    """Make processes of one machine and machines the processes of all."""
    here = draft.take("processes_here")
    machines = str(draft.facts["machines"].value) if "machines" in draft.facts else "1"
    if not machines.isdigit():
        draft.note_fact("open", "machines", "a range of machines; --nproc N says how many processes there are on all")
        del draft.facts["machines"]
    elif here is not None:
        draft.keep("processes", here * int(machines), draft.origin("processes_here", "machines"))

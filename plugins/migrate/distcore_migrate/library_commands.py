"""Commands of TRL, LLaMA-Factory, Axolotl and Lightning: a YAML file, and arguments behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distcore import ConfigError
from distcore_migrate.draft import Tree
from distcore_migrate.flag_parsing import is_flag, parse_flags, value_of
from distcore_migrate.launcher_flags import PROGRAMS
from distcore_migrate.libraries import read_job
from distcore_migrate.scripts import SCRIPTS
from distcore_migrate.sources import format_of, read_tree

LLAMA_FACTORY = ("llamafactory-cli", "llamafactory", "lmf")
TORCHRUN_OF = {
    "NNODES": "nnodes",
    "NPROC_PER_NODE": "nproc_per_node",
    "NODE_RANK": "node_rank",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
}
"""Variables by which ``llamafactory-cli`` starts torchrun, to its flags."""
OF_ACCELERATE = frozenset(
    {
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "multi_gpu",
        "use_fsdp",
        "use_deepspeed",
    }
)
"""Flags of ``accelerate launch`` that the command of TRL takes and hands on."""
OF_EIGHT: Tree = {"num_processes": 8, "mixed_precision": "bf16"}
SHIPPED: dict[str, Tree] = {
    "single_gpu": {"distributed_type": "NO", "mixed_precision": "bf16"},
    "multi_gpu": {"distributed_type": "MULTI_GPU", **OF_EIGHT},
    **{name: {"distributed_type": "FSDP", **OF_EIGHT} for name in ("fsdp1", "fsdp2")},
    **{
        f"zero{stage}": {"distributed_type": "DEEPSPEED", "zero_stage": stage, **OF_EIGHT}
        for stage in (1, 2, 3)
    },
}
"""Names that ``--accelerate_config`` of TRL takes in the place of a file, to their settings."""


def job_of_library(rest: list[str], environment: Tree) -> dict[str, Any] | None:
    """Return the parts of a command of TRL, LLaMA-Factory or Axolotl; ``None`` for another one.

    Removes from ``environment`` the variables that start ranks. Raises ConfigError for a command
    that trains nothing.
    """
    program = Path(rest[0]).name
    action = rest[1] if len(rest) > 1 else ""
    words = rest[2:]
    if program == "trl" and action in SCRIPTS:
        return _trl(action, words)
    if program not in (*LLAMA_FACTORY, "axolotl"):
        return None
    parts = _job(words) if action == "train" else None
    if parts is None:
        raise ConfigError(
            f"{program} {action}: trains nothing that can be read; known is {program} train"
            " FILE.yaml"
        )
    is_axolotl = program == "axolotl"
    launchers = _axolotl(parts, words) if is_axolotl else _llama_factory(environment)
    return {"name": f"{program} {action}", "launchers": launchers, **parts}


def llama_factory_job(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the parts of a command of LLaMA-Factory's own script.

    ``None`` for another script of the same name.
    """
    file = _file_of(words)
    has_file = file is not None and Path(file).is_file()
    if not has_file and "--stage" not in words:
        return None
    tree = read_tree(file) if file else parse_flags(words)
    if "stage" not in tree and format_of(tree, str(file)) != "LLaMA-Factory":
        return None
    return {"name": "train", **(_job(words) or {})}


def lightning_job(rest: list[str]) -> dict[str, Any] | None:
    """Return the parts of a command of the Lightning CLI, ``train.py fit --config FILE``.

    Its flags go over the values of the files. ``None`` for a command without a file.
    """
    files, words = _config_files(rest[2:])
    if not files:
        return None
    tree: Tree = {}
    for file in files:
        tree = _merged(tree, read_tree(file))
    arguments, script = read_job(tree, format_of(tree, files[0]))
    return {
        "name": f"{Path(rest[0]).stem} fit",
        "script": script,
        "arguments": arguments | parse_flags(words),
    }


def _config_files(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files of ``--config FILE`` or ``--config=FILE``, and the other words."""
    files = []
    others = []
    remaining = iter(words)
    for word in remaining:
        name, _, file = word.partition("=")
        if name in ("--config", "-c"):
            files.append(file or next(remaining, ""))
        else:
            others.append(word)
    return files, others


def with_file(arguments: Tree) -> Tree:
    """Return TRL's arguments with those of the file that ``--config`` names, over which they go."""
    file = arguments.pop("config", None)
    arguments_of_file = read_tree(str(file)) if file else {}
    return arguments_of_file | arguments


def _merged(tree: Tree, other: Tree) -> Tree:
    """Return both trees as one, at every depth; the values of ``other`` win."""
    merged = tree | other
    for name in tree.keys() & other.keys():
        if isinstance(tree[name], dict) and isinstance(other[name], dict):
            merged[name] = _merged(tree[name], other[name])
    return merged


def _trl(action: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the parts of a command of TRL, some of whose flags are for Accelerate."""
    arguments = with_file(parse_flags(words))
    of_accelerate = {name: arguments.pop(name) for name in OF_ACCELERATE & arguments.keys()}
    config = arguments.pop("accelerate_config", None)
    if config is not None:
        of_accelerate = SHIPPED.get(str(config), {"config_file": config}) | of_accelerate
    launchers = (("accelerate", of_accelerate),) if of_accelerate else ()
    return {
        "name": f"trl {action}",
        "script": SCRIPTS[action],
        "arguments": arguments,
        "launchers": launchers,
    }


def _job(words: Sequence[str]) -> dict[str, Any] | None:
    """Return script and arguments of a YAML file with arguments behind it.

    These are flags, or words such as ``learning_rate=1e-5``. ``None`` if there is no file, and no
    argument of LLaMA-Factory.
    """
    # Behind "--" are flags of the launcher.
    words = list(words[: words.index("--")] if "--" in words else words)
    file = _file_of(words)
    given: Tree = {}
    flag_words = []
    for word in words:
        if "=" in word and not is_flag(word):
            name, _, value = word.partition("=")
            given[name] = value_of(value)
        elif word != file:
            flag_words.append(word)
    given |= parse_flags(flag_words)
    if file is not None:
        tree = read_tree(file)
        arguments, script = read_job(tree, format_of(tree, file), file)
    elif "stage" in given:
        arguments, script = read_job(given, "LLaMA-Factory", "")
    else:
        return None
    return {"script": script, "arguments": arguments | given}


def _file_of(words: Sequence[str]) -> str | None:
    """Return the first word that names a YAML or JSON file; ``None`` if there is none."""
    for word in words:
        if not is_flag(word) and Path(word).suffix in (".yaml", ".yml", ".json"):
            return word
    return None


def _axolotl(parts: dict[str, Any], words: Sequence[str]) -> tuple[tuple[str, Tree], ...]:
    """Return the launcher of ``--launcher``, whose flags are behind ``--``."""
    program = parts["arguments"].pop("launcher", None)
    flags = list(words[words.index("--") + 1 :]) if "--" in words else []
    if program not in ("torchrun", "accelerate") and not flags:
        return ()
    name = str(program or "accelerate")
    return ((name, PROGRAMS[name].flags.cut(flags)[0]),)


def _llama_factory(environment: Tree) -> tuple[tuple[str, Tree], ...]:
    """Return torchrun as the variables of the command start it."""
    if not {"FORCE_TORCHRUN", "NPROC_PER_NODE", "NNODES"} & environment.keys():
        return ()
    environment.pop("FORCE_TORCHRUN", None)
    flags: Tree = {"nproc_per_node": "gpu"}
    for name, flag in TORCHRUN_OF.items():
        if name in environment:
            flags[flag] = value_of(environment.pop(name))
    return (("torchrun", flags),)

"""Commands of TRL, LLaMA-Factory, Axolotl and Lightning, whose arguments stand in a YAML
file and behind it.
"""

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
"""Names that ``--accelerate_config`` of TRL takes in the place of a file, to what its files
of these names say.
"""


def job_of_library(rest: list[str], environment: Tree) -> dict[str, Any] | None:
    """Return the parts of a command of TRL, LLaMA-Factory or Axolotl; ``None`` for another one.

    Removes from ``environment`` what starts ranks. Raises ConfigError for a
    command that trains nothing.
    """
    program, action, words = Path(rest[0]).name, rest[1] if len(rest) > 1 else "", rest[2:]
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
    started = _axolotl(parts, words) if program == "axolotl" else _llama_factory(environment)
    return {"name": f"{program} {action}", "launchers": started, **parts}


def llama_factory_job(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the parts of a command of LLaMA-Factory's own script; ``None`` for a
    script of that name alone.
    """
    file = _file_of(words)
    if (file is not None and Path(file).is_file()) or "--stage" in words:
        tree = read_tree(file) if file else parse_flags(words)
        if "stage" in tree or format_of(tree, str(file)) == "LLaMA-Factory":
            return {"name": "train", **(_job(words) or {})}
    return None


def lightning_job(rest: list[str]) -> dict[str, Any] | None:
    """Return the parts of a command of the Lightning CLI, ``train.py fit --config FILE``,
    whose flags go first.
    """
    words, files = rest[2:], list[str]()
    while place := next(
        (i for i, word in enumerate(words, 1) if word.split("=")[0] in ("--config", "-c")), None
    ):
        given = words[place - 1].partition("=")[2]
        files.append(given or "".join(words[place : place + 1]))
        del words[place - 1 : place + (not given)]
    if not files:
        return None
    tree: Tree = {}
    for file in files:
        tree = _deep(tree, read_tree(file))
    arguments, script = read_job(tree, format_of(tree, files[0]))
    return {
        "name": f"{Path(rest[0]).stem} fit",
        "script": script,
        "arguments": arguments | parse_flags(words),
    }


def with_file(arguments: Tree) -> Tree:
    """Return TRL's arguments with those of the file that ``--config`` names, over which they go."""
    file = arguments.pop("config", None)
    return (read_tree(str(file)) if file else {}) | arguments


def _deep(tree: Tree, other: Tree) -> Tree:
    both = {
        name
        for name in tree.keys() & other.keys()
        if isinstance(tree[name], dict) and isinstance(other[name], dict)
    }
    return tree | other | {name: _deep(tree[name], other[name]) for name in both}


def _trl(action: str, words: Sequence[str]) -> dict[str, Any]:
    arguments = with_file(parse_flags(words))
    started = {name: arguments.pop(name) for name in OF_ACCELERATE & arguments.keys()}
    if (config := arguments.pop("accelerate_config", None)) is not None:
        started = SHIPPED.get(str(config), {"config_file": config}) | started
    launchers = (("accelerate", started),) if started else ()
    return {
        "name": f"trl {action}",
        "script": SCRIPTS[action],
        "arguments": arguments,
        "launchers": launchers,
    }


def _job(words: Sequence[str]) -> dict[str, Any] | None:
    """Return script and arguments of a YAML file with flags, or words such
    as ``learning_rate=1e-5``, behind it.
    """
    own = list(words[: words.index("--")] if "--" in words else words)
    file = _file_of(own)
    pairs = [word for word in own if "=" in word and not is_flag(word)]
    given = {name: value_of(value) for name, _, value in (word.partition("=") for word in pairs)}
    given |= parse_flags([word for word in own if word != file and word not in pairs])
    if file is None and "stage" not in given:
        return None
    tree = read_tree(file) if file else given
    arguments, script = read_job(
        tree, format_of(tree, file) if file else "LLaMA-Factory", file or ""
    )
    return {"script": script, "arguments": arguments | given}


def _file_of(words: Sequence[str]) -> str | None:
    return next(
        (
            word
            for word in words
            if not is_flag(word) and Path(word).suffix in (".yaml", ".yml", ".json")
        ),
        None,
    )


def _axolotl(parts: dict[str, Any], words: Sequence[str]) -> tuple[tuple[str, Tree], ...]:
    """Return the launcher of ``--launcher``, whose flags stand behind ``--``."""
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
    flags = {
        flag: value_of(environment.pop(name))
        for name, flag in TORCHRUN_OF.items()
        if name in environment
    }
    return (("torchrun", {"nproc_per_node": "gpu"} | flags),)

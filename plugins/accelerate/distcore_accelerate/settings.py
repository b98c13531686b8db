"""Read settings of Accelerate from options, an ``accelerate config``
file and ``accelerate launch``.

All three sources give one ``Settings``. A contradiction between two of them is a one-line error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distcore import ConfigError, nearest
from distcore_accelerate.options import AccelerateOptions, BackendName

Tree = dict[str, Any]

BACKENDS: dict[str, BackendName] = {
    "NO": "ddp",
    "MULTI_CPU": "ddp",
    "MULTI_GPU": "ddp",
    "FSDP": "fsdp2",
    "DEEPSPEED": "deepspeed",
}
"""Map each ``distributed_type`` to its backend."""
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
READ = frozenset(
    {
        "compute_environment",
        "distributed_type",
        "mixed_precision",
        "fp16",
        "num_processes",
        "use_cpu",
        "gpu_ids",
    }
    | {"num_machines", "main_process_ip", "main_process_port", "fsdp_config", "deepspeed_config"}
)
"""Keys of an ``accelerate config`` file that concern a run."""
LAUNCHING = frozenset(
    {"debug", "machine_rank", "rdzv_backend", "same_network"}
    | {"main_training_function", "downcast_bf16", "command_file", "commands"}
    | {"tpu_name", "tpu_zone", "tpu_env", "tpu_vm", "tpu_use_cluster", "tpu_use_sudo"}
)
"""Keys that only concern the launcher."""
OF_LAUNCHER = {
    "num_cpu_threads_per_process": "--env OMP_NUM_THREADS=N",
    "mpirun_config": "--launcher mpi",
}
"""Keys that its launcher alone obeys, with the flag of distcore's."""
UNSUPPORTED = {
    "dynamo_config": "use --compile on or --compile regions",
    "dynamo_backend": "use --compile on or --compile regions",
    "fp8_config": "use --precision bf16",
    "megatron_lm_config": "there is no Megatron-LM here",
    "parallelism_config": "ranks are data parallel here",
    "enable_cpu_affinity": "use --bind-cores",
}
"""Keys that would change the run but are not supported, with the remedy."""
DECIDING = {"dynamo_config": "dynamo_backend", "parallelism_config": "_size"}
"""How the keys of a section end that ask for something; the others only say how."""

ASKED_BY_LAUNCHER = {
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_config",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
    "ACCELERATE_CPU_AFFINITY": "enable_cpu_affinity",
}
"""Variables by which ``accelerate launch`` asks for what is not supported, to the key in a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of Accelerate, from all three sources."""

    backend: BackendName = "ddp"
    """The backend of Accelerate to train on."""
    source: str = "strategy_options.backend"
    """Origin of the backend, for messages: a file, the launcher, or an option."""
    distributed_type: str | None = None
    """Name of the type in the file or the launcher."""
    precision: str | None = None
    """The requested value of ``--precision``."""
    processes: int | None = None
    """The requested number of ranks on all machines; ``None`` if unset."""
    machines: int = 1
    """The requested number of machines."""
    address: str = "HOST:PORT"
    """Where the first machine waits for the others."""
    use_cpu: bool = False
    """True if the file requires the CPU, even with GPUs."""
    gpu_ids: str | None = None
    """The allowed GPUs, in the form of CUDA_VISIBLE_DEVICES; ``None``: all."""
    fsdp: Tree = field(default_factory=dict)
    """Section ``fsdp_config``, keys without their prefix."""
    deepspeed: Tree = field(default_factory=dict)
    """Section ``deepspeed_config``."""
    of_launcher: tuple[str, ...] = ()
    """The keys of ``OF_LAUNCHER`` that the file sets."""


def read_settings(options: AccelerateOptions, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings.

    Raises ConfigError, one line, for an unreadable file or a contradiction.
    """
    started = _settings_of(read_launcher(environ), "accelerate launch")
    asked = (
        _settings_of(read_file(options.config_file), options.config_file)
        if options.config_file
        else started
    )
    if options.config_file and started.distributed_type and started.backend != asked.backend:
        raise ConfigError(
            f"{asked.source}: asks for {asked.backend}, but accelerate launch was told"
            f" {started.distributed_type}; give it the same --config_file"
        )
    if options.backend is None:
        return asked
    if asked.distributed_type and asked.backend != options.backend:
        raise ConfigError(
            f"strategy_options.backend = {options.backend!r}, but {asked.source}: distributed_type"
            f" = {asked.distributed_type!r}; leave one of them out"
        )
    return Settings(
        backend=options.backend,
        precision=asked.precision,
        processes=asked.processes,
        machines=asked.machines,
        address=asked.address,
        use_cpu=asked.use_cpu,
        gpu_ids=asked.gpu_ids,
        fsdp=asked.fsdp,
        deepspeed=asked.deepspeed,
        of_launcher=asked.of_launcher,
    )


def read_launcher(environ: Mapping[str, str]) -> Tree:
    """Return the settings of ``accelerate launch`` from the environment, in the
    form of its config file.
    """
    tree: Tree = {}
    if _on(environ, "ACCELERATE_USE_DEEPSPEED"):
        tree["distributed_type"] = "DEEPSPEED"
        tree["deepspeed_config"] = dict(_section(environ, "ACCELERATE_DEEPSPEED_")) | dict(
            _section(environ, "ACCELERATE_", "GRADIENT_ACCUMULATION_STEPS", "GRADIENT_CLIPPING")
        )
        if "config_file" in tree["deepspeed_config"]:
            tree["deepspeed_config"]["deepspeed_config_file"] = tree["deepspeed_config"].pop(
                "config_file"
            )
    elif _on(environ, "ACCELERATE_USE_FSDP"):
        tree["distributed_type"] = "FSDP"
        section = dict(_section(environ, "FSDP_"))
        if "transformer_cls_to_wrap" in section:  # the one variable that is not named like its key
            section["transformer_layer_cls_to_wrap"] = section.pop("transformer_cls_to_wrap")
        # The launcher always says a size, which without this policy is its default.
        if section.get("auto_wrap_policy") != "SIZE_BASED_WRAP":
            section.pop("min_num_params", None)
        tree["fsdp_config"] = {f"fsdp_{key}": value for key, value in section.items()}
    for name, key in ASKED_BY_LAUNCHER.items():
        if name in environ:
            tree[key] = environ[name]
    # The launcher also sets "no" without a request.
    if (precision := environ.get("ACCELERATE_MIXED_PRECISION", "no")) != "no":
        tree["mixed_precision"] = precision
    return tree


def read_file(path: str) -> Tree:
    """Return the tree of an ``accelerate config`` file, YAML or JSON.
    Raises ConfigError, one line.
    """
    try:
        tree = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"strategy_options.config_file = {path!r}: cannot be read: {reason}"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: expected the keys of `accelerate config`, found {type(tree).__name__}"
        )
    if "distributed_type" not in tree:
        raise ConfigError(
            f"{path}: has no distributed_type ({', '.join(BACKENDS)}); write it with `accelerate"
            " config`"
        )
    return tree


def _settings_of(tree: Tree, source: str) -> Settings:
    """Return the settings in an accelerate config; raises ConfigError, one line, for others."""
    _check_keys(tree, source)
    kind = tree.get("distributed_type")
    if kind is not None and kind not in BACKENDS:
        hint = nearest(str(kind), BACKENDS)
        raise ConfigError(
            f"{source}: distributed_type = {kind!r}: not supported{hint} ({', '.join(BACKENDS)})"
        )
    gpu_ids = tree.get("gpu_ids")
    fsdp = {}
    for key, value in _subtree(tree, "fsdp_config", source).items():
        # Each key has the prefix in a file, and none as an argument of Accelerate's plugin.
        fsdp[key.removeprefix("fsdp_")] = value
    return Settings(
        backend=BACKENDS[kind] if kind else "ddp",
        source=source,
        distributed_type=kind,
        precision=_precision(tree, source),
        processes=_count(tree, "num_processes", source),
        machines=_count(tree, "num_machines", source) or 1,
        address=_address(tree),
        use_cpu=bool(tree.get("use_cpu")),
        gpu_ids=None if gpu_ids in (None, "all") else str(gpu_ids),
        fsdp=fsdp,
        deepspeed=_subtree(tree, "deepspeed_config", source),
        of_launcher=tuple(key for key in OF_LAUNCHER if _asks(tree.get(key))),
    )


def _check_keys(tree: Tree, source: str) -> None:
    """Raise ConfigError, one line, for a key that is unknown, or is on and not supported."""
    for key, value in tree.items():
        if key in UNSUPPORTED and _asks(value, key):
            raise ConfigError(f"{source}: {key} is not supported: {UNSUPPORTED[key]}; take it out")
        known_keys = READ | LAUNCHING | OF_LAUNCHER.keys()
        if key not in known_keys | UNSUPPORTED.keys():
            raise ConfigError(f"{source}: unknown key {key!r}{nearest(str(key), known_keys)}")
    if tree.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError(
            f"{source}: compute_environment = {tree['compute_environment']!r}: only"
            " LOCAL_MACHINE is"
        )


def _asks(value: Any, key: str = "") -> bool:
    """Return False for a value that is off, an empty section, or one with such values only."""
    if not isinstance(value, Mapping):
        return str(value).lower() not in ("no", "none", "false", "")
    end_of_name = DECIDING.get(key, "")
    for name, inner in value.items():
        # In a section a 1 is the size of a group, which is no group.
        if str(name).endswith(end_of_name) and str(inner) != "1" and _asks(inner):
            return True
    return False


def _subtree(tree: Tree, key: str, source: str) -> Tree:
    section = tree.get(key) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{source}: {key} = {section!r}: expected keys and values")
    return dict(section)


def _precision(tree: Tree, source: str) -> str | None:
    """Return distcore's name of the precision; ``None`` if the file says none."""
    # Files of Accelerate's first releases have the key fp16.
    value = tree.get("mixed_precision", "fp16" if tree.get("fp16") else None)
    if value is None:
        return None
    # YAML reads a bare no as false.
    word = "no" if value is False else str(value).lower()
    if word not in PRECISIONS:
        raise ConfigError(
            f"{source}: mixed_precision = {value!r}: not supported{nearest(word, PRECISIONS)}"
            f" ({', '.join(PRECISIONS)})"
        )
    return PRECISIONS[word]


def _count(tree: Tree, key: str, source: str) -> int | None:
    value = tree.get(key)
    if value in (None, -1):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{source}: {key} = {value!r}: expected a whole number, 1 or more")
    return value


def _address(tree: Tree) -> str:
    """Return where the first machine waits for the others, as ``--launcher torchrun`` takes it."""
    if not tree.get("main_process_ip"):
        return "HOST:PORT"
    return f"{tree['main_process_ip']}:{tree.get('main_process_port') or 29500}"


def _on(environ: Mapping[str, str], name: str) -> bool:
    """Return the truth value of a variable.

    Raises ConfigError for other words, such as one in typographic quotes.
    """
    word = environ.get(name, "").lower()
    if word in ("1", "true", "yes", "on", "y", "t"):
        return True
    if word in ("0", "false", "no", "off", "n", "f", ""):
        return False
    raise ConfigError(f"{name} = {environ[name]!r}: expected true or false")


def _section(environ: Mapping[str, str], prefix: str, *only: str) -> Iterator[tuple[str, Any]]:
    """Yield variables with ``prefix``: keys in lower case, and values parsed as YAML."""
    for name, value in environ.items():
        if not name.startswith(prefix):
            continue
        key = name.removeprefix(prefix)
        is_wanted = not only or key in only
        # Accelerate sets what it has no value for to the text None.
        if is_wanted and value not in ("None", ""):
            yield key.lower(), yaml.safe_load(value)

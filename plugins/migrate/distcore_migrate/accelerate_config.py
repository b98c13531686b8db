"""A file of ``accelerate config``, and the flags of ``accelerate launch``, which say the same:
one row per key.
"""

from __future__ import annotations

from typing import Any

from distcore import ConfigError, nearest
from distcore_migrate import fsdp_config
from distcore_migrate.draft import (
    OFF,
    Draft,
    Kind,
    Rule,
    Tree,
    apply,
    fact,
    flag,
    instead,
    no_effect,
    none,
    positive_or_none,
    start_flag,
    to,
    whole,
    written,
)

KINDS = {
    "NO": "single",
    "MULTI_CPU": "ddp",
    "MULTI_GPU": "ddp",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
}
"""``distributed_type`` to a strategy."""
PRECISIONS = {"no": "fp32", "false": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""``mixed_precision`` to ``precision``; YAML reads a bare no as false."""


def _kind(draft: Draft, name: str, value: Any) -> None:
    """Keep the kind of strategy of ``distributed_type``; raises ConfigError without one here."""
    # YAML reads a bare NO as false.
    word = "NO" if value is False else str(value)
    if word not in KINDS:
        raise ConfigError(
            f"{name} = {value}: no strategy for it{nearest(word, KINDS)} ({', '.join(KINDS)})"
        )
    draft.keep("kind", KINDS[word], name)
    if word == "MULTI_CPU":
        draft.set("device", "cpu", name)


def _flag_of(kind: str) -> Rule:
    """A flag that stands for a ``distributed_type``."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if flag(value):
            draft.keep("kind", KINDS[kind], name)
        else:
            draft.note("off", name)

    return rule


def _precision(draft: Draft, name: str, value: Any) -> None:
    if (word := str(value).lower()) in PRECISIONS:
        draft.keep("launched_precision", PRECISIONS[word], name)
    else:
        draft.note("none", written(name, value), "precisions here: fp32, bf16, fp16")


def _cpu(draft: Draft, name: str, value: Any) -> None:
    if flag(value):
        draft.set("device", "cpu", name)
    else:
        draft.note("off", name)


def _processes(draft: Draft, name: str, value: Any) -> None:
    if value in (None, -1):
        draft.note("off", name)
    else:
        draft.keep("processes", whole(value), name)


def _gpus(draft: Draft, name: str, value: Any) -> None:
    if value in (None, "all"):
        draft.note("off", name)
    else:
        draft.start += ["--include", f"localhost:{value}"]
        draft.note("start", written(name, value), f"--include localhost:{value}")


def rank_of_machine(draft: Draft, name: str, value: Any) -> None:
    """Keep the number of this machine, which must fit the number of machines."""
    LAUNCHER(draft, name, value)
    if str(value).isdigit():
        draft.keep("rank_of_machine", int(value), name)


def _environment(draft: Draft, name: str, value: Any) -> None:
    if value == "LOCAL_MACHINE":
        draft.note("off", name)
    else:
        draft.note("none", written(name, value), "there is no cloud here")


def _nested(key: str, kind: Kind = "none") -> Rule:
    """A section that changes the run if anything in it is on."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        inner = value if isinstance(value, dict) else {"": value}
        settings = {
            part: word
            for part, word in inner.items()
            if str(word).lower() not in ("no", "none", "false", "")
        }
        if all(str(word) == "1" for word in settings.values()):  # sizes of one, which split nothing
            draft.note("off", name)
            return
        for part, word in settings.items():
            draft.note(kind, written(f"{name}.{part}".rstrip("."), word), key)

    return rule


LAUNCHER = no_effect("distcore's launchers do the same by themselves")
MESH = "--strategy mesh splits layers over ranks (tensor, sequence and context parallel)"
TPU = no_effect("only matters on a TPU")
COMPILED = _nested("use --compile on or --compile regions", "instead")
ROWS: dict[str, Rule] = {
    "compute_environment": _environment,
    "distributed_type": _kind,
    "multi_gpu": _flag_of("MULTI_GPU"),
    "use_deepspeed": _flag_of("DEEPSPEED"),
    "use_fsdp": _flag_of("FSDP"),
    "mixed_precision": _precision,
    "fp16": _precision,
    "num_processes": _processes,
    "num_machines": fact("machines", whole),
    "use_cpu": _cpu,
    "cpu": _cpu,
    "gpu_ids": _gpus,
    "machine_rank": rank_of_machine,
    "main_process_ip": fact("address"),
    "main_process_port": fact("port"),
    "rdzv_backend": LAUNCHER,
    "rdzv_conf": LAUNCHER,
    "same_network": LAUNCHER,
    "main_training_function": LAUNCHER,
    "enable_cpu_affinity": start_flag("--bind-cores"),
    "num_cpu_threads_per_process": no_effect("each rank takes its share of the cores"),
    "mpirun_config": LAUNCHER,
    "mpirun_hostfile": fact("hostfile"),
    "mpirun_ccl": LAUNCHER,
    "aws_access_key_id": none("there is no cloud here"),
    "aws_secret_access_key": none("there is no cloud here"),
    "command_file": LAUNCHER,
    "commands": LAUNCHER,
    "role": LAUNCHER,
    "tee": LAUNCHER,
    "log_dir": start_flag("--log-dir", "{}"),
    "module": LAUNCHER,
    "m": LAUNCHER,
    "no_python": LAUNCHER,
    "quiet": LAUNCHER,
    "monitor_interval": LAUNCHER,
    "max_restarts": to("max_restarts", whole),
    "debug": no_effect("ranks compare rows and weights in their first steps, and say what differs"),
    "downcast_bf16": TPU,
    "tpu_name": TPU,
    "tpu_zone": TPU,
    "tpu_env": TPU,
    "tpu_vm": TPU,
    "tpu_use_cluster": TPU,
    "tpu_use_sudo": TPU,
    "tpu_cluster": TPU,
    "no_tpu_cluster": TPU,
    "vm": TPU,
    "env": TPU,
    "tpu": none("there is no XLA here; --device takes what torch.accelerator sees"),
    "dynamo_config": COMPILED,
    "dynamo_backend": COMPILED,
    "dynamo_mode": COMPILED,
    "dynamo_use_dynamic": COMPILED,
    "dynamo_use_fullgraph": COMPILED,
    "dynamo_use_regional_compilation": COMPILED,
    "fp8_config": _nested("use precision bf16"),
    "megatron_lm_config": _nested("there is no Megatron-LM here"),
    "use_megatron_lm": none("there is no Megatron-LM here"),
    "parallelism_config": _nested(MESH, "instead"),
    "use_parallelism_config": instead(MESH),
}
SECTION_ROWS: dict[str, Rule] = {
    "zero_stage": fact("zero_stage", whole),
    "offload_optimizer_device": fact("zero_offload_optimizer"),
    "offload_param_device": fact("zero_offload_param"),
    "offload_optimizer_nvme_path": fact("zero_nvme_path"),
    "offload_param_nvme_path": fact("zero_nvme_path"),
    "gradient_accumulation_steps": fact("accumulation", whole),
    "gradient_clipping": to("clip.norm", positive_or_none),
    "zero3_init_flag": no_effect("the strategy builds the model as its stage needs it"),
    "zero3_save_16bit_model": no_effect("checkpoint export writes the whole model at any stage"),
    "deepspeed_config_file": fact("deepspeed"),
    "deepspeed_hostfile": fact("hostfile"),
    "deepspeed_exclusion_filter": fact("exclude"),
    "deepspeed_inclusion_filter": fact("include"),
    "deepspeed_multinode_launcher": fact("launcher"),
    "deepspeed_moe_layer_cls_names": none("there are no mixtures of experts here"),
}
"""The keys of ``deepspeed_config``."""


def read(draft: Draft, tree: Tree, prefix: str = "") -> None:
    """Put the keys of the file into ``draft``; raises ConfigError for a kind of training
    that has no strategy.
    """
    rest = {
        key: value for key, value in tree.items() if key not in ("deepspeed_config", "fsdp_config")
    }
    apply(draft, ROWS, rest, "accelerate config", prefix)
    kind = draft.facts["kind"].value if "kind" in draft.facts else None
    for section, wanted in (("deepspeed_config", "deepspeed"), ("fsdp_config", "fsdp")):
        inner = tree.get(section)
        if inner is None or inner in OFF:
            draft.note("off", section) if section in tree else None
        elif kind != wanted:
            draft.note("idle", section, f"for distributed_type {wanted.upper()}, which this is not")
        elif wanted == "fsdp":
            fsdp_config.read(draft, inner, f"{prefix}fsdp_")
        else:
            settings = {
                key: value for key, value in inner.items() if value not in (None, "none", "auto")
            }
            for key in [key for key in inner if key not in settings]:
                draft.note("off", f"{prefix}{key}")
            apply(draft, SECTION_ROWS, settings, "deepspeed_config", prefix)


def tree_of(flags: Tree) -> Tree:
    """Return the flags of ``accelerate launch`` in the terms of the file."""
    tree: Tree = {}
    sections: dict[str, Tree] = {"deepspeed_config": {}, "fsdp_config": {}}
    for name, value in flags.items():
        if name in SECTION_ROWS:
            sections["deepspeed_config"][name] = value
        elif name.startswith("fsdp_"):
            sections["fsdp_config"][name] = value
        else:
            tree[name] = value
    return tree | {name: section for name, section in sections.items() if section}

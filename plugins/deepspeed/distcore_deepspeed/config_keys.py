"""Keys and values of a DeepSpeed JSON that DeepSpeed refuses, and keys that it ignores silently."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from distcore import nearest
from distcore_deepspeed.json_config import BATCH, ZERO, Tree, get
from distcore_deepspeed.library import (
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    lr_schedules,
    parse_config,
)

SECTIONS = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "autotuning",
        "bf16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_types",
        "dataloader_drop_last",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)
"""Top-level keys of DeepSpeed 0.19."""
MODELS: dict[str, type[BaseModel]] = {
    ZERO: DeepSpeedZeroConfig,
    f"{ZERO}.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    f"{ZERO}.offload_param": DeepSpeedZeroOffloadParamConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
}
"""Sections for which DeepSpeed has a pydantic model."""
SECTION_OF = {
    "CompileConfig": "compile",
    "DeepSpeedMonitorConfig": "",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
}
"""Models of DeepSpeed that say another name in their errors than the section has."""
TYPE_AND_PARAMS = frozenset({"type", "params", "legacy_fusion"})
"""Keys of the sections ``optimizer`` and ``scheduler``."""
IGNORES: dict[str, frozenset[str]] = {
    "": SECTIONS,
    "optimizer": TYPE_AND_PARAMS,
    "scheduler": TYPE_AND_PARAMS,
}
"""Sections in which DeepSpeed ignores keys that it does not know, with those that it knows."""
ENGINE_ONLY = frozenset({"torch_adam", "adam_w_mode", "fp32_optimizer_states"})
"""Parameters of Adam that DeepSpeed's engine reads and does not pass on."""


def ignored_keys(tree: Tree) -> Iterator[str]:
    """Yield a message for each key that DeepSpeed ignores, with the nearest known key."""
    for path, names in IGNORES.items():
        for key in _section(tree, path):
            if key not in names:
                yield f"{f'{path}.{key}'.lstrip('.')!r}{nearest(key, names)}"


def unknown_keys(tree: Tree, device: str, offload: str) -> list[str]:
    """Return a message for each key whose name DeepSpeed refuses, with the nearest known key."""
    known_keys: dict[str, Collection[str]] = {}
    for path, model in MODELS.items():
        known_keys[path] = _fields(model)
    known_keys["optimizer.params"] = _optimizer_arguments(tree, device, offload)
    known_keys["scheduler.params"] = _scheduler_arguments(tree)
    messages = []
    for path, names in known_keys.items():
        # DeepSpeed has no optimizer or schedule of that name, or none is set.
        if not names:
            continue
        for key in _section(tree, path):
            if key not in names:
                dotted = f"{path}.{key}"
                messages.append(f"unknown key {dotted!r}{nearest(key, names)}")
    return messages


def refusals(tree: Tree) -> list[str]:
    """Return a message for each reason for which DeepSpeed itself would refuse
    the resolved config ``tree``.
    """
    # DeepSpeed reads it as one rank here: the batch would not be that of all ranks.
    rest = {
        key: value for key, value in tree.items() if key not in (*BATCH, "optimizer", "scheduler")
    }
    try:
        parse_config(rest | {"train_micro_batch_size_per_gpu": 1})
    except ValidationError as error:
        return [_wrong_value(error.title, dict(problem)) for problem in error.errors()]
    except Exception as error:
        # it raises ValueError, TypeError, AssertionError and errors of its own
        return [" ".join(str(error).split()) or type(error).__name__]
    return []


def _wrong_value(title: str, error: dict[str, Any]) -> str:
    """Return a message for a value that pydantic refuses; ``title``: the class of the section."""
    sections = {model.__name__: path for path, model in MODELS.items()} | SECTION_OF
    parts = (sections.get(title, title), *map(str, error["loc"]))
    key = ".".join(filter(None, parts))
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}"
    reason = error["msg"].lower().removeprefix("value error, ")
    return f"{key} = {error['input']!r}: {reason}"


def _fields(model: type[BaseModel]) -> set[str]:
    """Return the keys of a section, under both of their names."""
    names = set(model.model_fields)
    for field in model.model_fields.values():
        if field.alias:
            names.add(field.alias)
    return names


def _section(tree: Tree, path: str) -> Tree:
    section = get(tree, path) if path else tree
    return section if isinstance(section, dict) else {}


def _scheduler_arguments(tree: Tree) -> set[str]:
    name = str(_section(tree, "scheduler").get("type"))
    scheduler = getattr(lr_schedules, name, None)
    if not inspect.isclass(scheduler):
        return set()
    return _arguments(scheduler) - {"optimizer", "last_batch_iteration"}


def _optimizer_arguments(tree: Tree, device: str, offload: str) -> set[str]:
    """Return the parameters of the optimizer class that DeepSpeed builds; empty without one."""
    section = _section(tree, "optimizer")
    kind = section.get("type")
    params = _section(section, "params")
    if kind == "Lamb":
        from deepspeed.ops.lamb import FusedLamb

        return _arguments(FusedLamb) - {"params"}
    if kind not in ("Adam", "AdamW"):
        return set()
    optimizer = _adam(params.get("torch_adam"), device, offload)
    return _arguments(optimizer) - {"params", "model_params"} | ENGINE_ONLY


def _adam(of_torch: Any, device: str, offload: str) -> Any:
    """Return the class that DeepSpeed builds for Adam, on this device and with this offload."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if of_torch or (of_torch is None and device == "cpu" and offload == "none"):
        return torch.optim.AdamW
    return FusedAdam if offload == "none" else DeepSpeedCPUAdam


def _arguments(cls: Any) -> set[str]:
    return set(inspect.signature(cls).parameters)

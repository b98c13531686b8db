"""The sections ``zero_optimization``, ``fp16`` and ``bf16`` of DeepSpeed's JSON."""

from __future__ import annotations

from typing import Any

from distcore_migrate.deepspeed_rules import AUTO, GONE, OPTIONS, as_it_is, option, unless_auto
from distcore_migrate.draft import OFF, Draft, Rule, Tree, apply, fact, flag, no_effect, whole


def _precision(draft: Draft, name: str, value: Any) -> None:
    word, on = name.partition(".")[0].replace("bfloat16", "bf16"), value
    if on == AUTO:
        draft.note("off", name)
    elif flag(on):
        draft.keep("precision", word, name)
    else:
        draft.note("off", name)


def _offload(draft: Draft, name: str, value: Any) -> None:
    section = value if isinstance(value, dict) else {"device": value}
    device = option(name.partition(".")[2])
    for key, inner in section.items():
        if key == "device":
            device(draft, f"{name}.{key}", inner)
        elif key == "nvme_path":
            draft.set(f"{OPTIONS}nvme_path", str(inner), f"{name}.{key}")
        else:
            as_it_is(draft, f"{name}.{key}", inner)


def _old_offload(target: str) -> Rule:
    def rule(draft: Draft, name: str, value: Any) -> None:
        if value in OFF:
            draft.note("off", name)
        else:
            draft.set(f"{OPTIONS}{target}", "cpu", name)

    return rule


def _loss_scale(draft: Draft, name: str, value: Any) -> None:
    if value in (0, AUTO, None):
        draft.note("off", name)
    else:
        as_it_is(draft, name, value)


SAVED = no_effect("checkpoints are distcore's: neutral, and exported whole")
ZERO_ROWS: dict[str, Rule] = {
    "stage": unless_auto(fact("zero_stage", whole)),
    "offload_optimizer": _offload,
    "offload_param": _offload,
    "cpu_offload": _old_offload("offload_optimizer"),
    "cpu_offload_params": _old_offload("offload_param"),
    "cpu_offload_use_pin_memory": GONE,
    "overlap_comm": option("overlap_comm", flag),
    "reduce_bucket_size": option("reduce_bucket_size", whole, auto=True),
    "allgather_bucket_size": option("allgather_bucket_size", whole),
    "round_robin_gradients": option("round_robin_gradients", flag),
    "sub_group_size": option("sub_group_size", whole),
    "stage3_prefetch_bucket_size": option("stage3_prefetch_bucket_size", whole, auto=True),
    "stage3_param_persistence_threshold": option(
        "stage3_param_persistence_threshold", whole, auto=True
    ),
    "stage3_max_live_parameters": option("stage3_max_live_parameters", whole),
    "stage3_max_reuse_distance": option("stage3_max_reuse_distance", whole),
    "stage3_gather_16bit_weights_on_model_save": SAVED,
    "stage3_gather_fp16_weights_on_model_save": SAVED,
    "gather_16bit_weights_on_model_save": SAVED,
    "load_from_fp32_weights": SAVED,
    "elastic_checkpoint": SAVED,
    "legacy_stage1": GONE,
}
"""Keys of ``zero_optimization``; the others are taken as they are."""
FP16_ROWS: dict[str, Rule] = {
    "enabled": _precision,
    "loss_scale": _loss_scale,
    "initial_scale_power": option("initial_scale_power", whole),
    "loss_scale_window": option("loss_scale_window", whole),
    "hysteresis": option("hysteresis", whole),
    "min_loss_scale": option("min_loss_scale", whole),
}
"""Keys of ``fp16``; the others are taken as they are."""


def zero_section(draft: Draft, name: str, value: Tree) -> None:
    """Read ``zero_optimization``."""
    rows = dict.fromkeys(value, as_it_is) | {
        key: row for key, row in ZERO_ROWS.items() if key in value
    }
    apply(draft, rows, value, name, f"{name}.")


def half_section(draft: Draft, name: str, value: Tree) -> None:
    """Read ``fp16`` or ``bf16``."""
    rows = dict.fromkeys(value, as_it_is) | {
        key: row for key, row in FP16_ROWS.items() if key in value
    }
    apply(draft, rows, value, name, f"{name}.")

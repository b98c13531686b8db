"""The sections ``optimizer`` and ``scheduler`` of DeepSpeed's JSON, and its defaults for
what they leave out.
"""

from __future__ import annotations

from typing import Any

from distcore_migrate.deepspeed_rules import AUTO, OPTIONS, unless_auto
from distcore_migrate.draft import (
    Draft,
    Kind,
    Rule,
    Tree,
    apply,
    flag,
    no_effect,
    none,
    to,
    whole,
    written,
)

OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adamw",
    "lamb": "deepspeed-lamb",
    "lion": "lion",
    "sgd": "sgd",
}
"""``optimizer.type`` to ``optimizer.name``; DeepSpeed's Adam decays weights as AdamW
does, unless told otherwise.
"""
OPTIMIZER_ROWS: dict[str, Rule] = {
    "lr": unless_auto(to("lr", float)),
    "betas": unless_auto(lambda draft, name, value: _betas(draft, name, value)),
    "eps": unless_auto(to("optimizer.eps", float)),
    "momentum": unless_auto(to("optimizer.momentum", float)),
    "nesterov": unless_auto(to("optimizer.nesterov", flag)),
    "weight_decay": unless_auto(to("optimizer.weight_decay", float)),
    "torch_adam": no_effect("the optimizer is torch's AdamW; deepspeed-adamw is DeepSpeed's"),
    "adam_w_mode": none("weight decay is decoupled", off=(True,)),
    "bias_correction": none("means are corrected", off=(True,)),
    "amsgrad": none("there is no such variant"),
    "adam_nvme_offload": no_effect("offload_optimizer says it"),
}
"""Keys of ``optimizer.params``."""


def _betas(draft: Draft, name: str, value: Any) -> None:
    for which, number in zip(("beta1", "beta2"), value, strict=True):
        draft.keep(which, float(number), name)


WARMUP = 1000
"""Steps of DeepSpeed's warm-up where ``params`` has no value."""
DEFAULTS: Tree = {"lr": ("lr", 1e-3), "weight_decay": ("optimizer.weight_decay", 0.0)}
"""Defaults of DeepSpeed's optimizers where ``params`` has no value, by the key here."""


def _left_out(draft: Draft, name: str, params: Tree) -> None:
    """Set DeepSpeed's default for a parameter that the section omits."""
    for param, (key, value) in DEFAULTS.items():
        about = f"{name}.params.{param}, not given"
        if param in params:
            continue
        if draft.values.get(key, value) != value:
            draft.note(
                "differs",
                about,
                f"DeepSpeed takes {value}, whatever another source says: written as that",
            )
            draft.values.pop(key)
            draft.origins.pop(key)
        draft.set(key, value, f"{about}: DeepSpeed's default")


def optimizer_section(draft: Draft, name: str, value: Tree) -> None:
    """Read ``optimizer``; a type that there is not here is written as AdamW, and said."""
    kind, params = value.get("type"), value.get("params") or {}
    if kind is not None:
        draft.keep("deepspeed_optimizer", kind, f"{name}.type")
        _left_out(
            draft,
            name,
            params if params.get("torch_adam") is not True else params | {"weight_decay": 0.01},
        )
    word = str(kind).lower()  # as DeepSpeed reads it
    if word in OPTIMIZERS:
        draft.set("optimizer.name", OPTIMIZERS[word], f"{name}.type")
    elif word == "muon":
        draft.note(
            "instead",
            f"{name}.type = Muon",
            "written as adamw; --optimizer muon takes another strategy, such as fsdp",
        )
    elif kind is not None:
        draft.note(
            "none",
            written(f"{name}.type", kind),
            "written as adamw; taken are Adam, AdamW, Lamb, Lion, SGD",
        )
    apply(draft, OPTIMIZER_ROWS, params, "optimizer.params", f"{name}.params.")


def scheduler_section(draft: Draft, name: str, value: Tree) -> None:
    """Read ``scheduler``: DeepSpeed's warm-ups stay as they are, its cosine becomes the
    schedule of that name.
    """
    kind, arguments = value.get("type"), dict(value.get("params") or {})
    if kind == "WarmupCosineLR":
        _cosine(draft, f"{name}.params.", arguments)
        return
    if kind not in ("WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest"):
        draft.note("instead", written(f"{name}.type", kind), "schedule.name says the schedule")
        draft.keep("other_schedule", kind, f"{name}.type")
        return
    draft.set(f"{OPTIONS}scheduler", kind, f"{name}.type")
    numbers = {key: number for key, number in arguments.items() if number != AUTO}
    for key in arguments.keys() - numbers.keys():
        draft.note("off", f"{name}.params.{key}")
    if kind.startswith("Warmup") and "warmup_num_steps" not in arguments:
        draft.keep(
            "warmup_steps",
            WARMUP,
            f"{name}.params.warmup_num_steps, not given: DeepSpeed's default",
        )
    if "warmup_num_steps" in numbers:
        draft.keep(
            "warmup_steps",
            whole(numbers.pop("warmup_num_steps")),
            f"{name}.params.warmup_num_steps",
        )
    if "warmup_max_lr" in numbers:
        draft.set("lr", float(numbers.pop("warmup_max_lr")), f"{name}.params.warmup_max_lr")
    if "total_num_steps" in numbers:
        total = numbers.pop("total_num_steps")
        draft.note(
            "differs",
            written(f"{name}.params.total_num_steps", total),
            "the decay ends with the run itself",
        )
    for key, number in numbers.items():
        draft.set(f"{OPTIONS}scheduler_params.{key}", number, f"{name}.params.{key}")
    draft.keep("deepspeed_schedule", kind, f"{name}.type")
    if kind.startswith("Warmup"):
        schedule_here = "constant" if kind == "WarmupLR" else "linear"
        draft.note(
            "differs",
            written(f"{name}.type", kind),
            "DeepSpeed's own, for strategy deepspeed alone; for any strategy take schedule.name:"
            f" {schedule_here}, whose warm-up is linear, with one step at the least rate, not two",
        )


def _cosine(draft: Draft, name: str, given: Tree) -> None:
    """Write DeepSpeed's cosine as the schedule of that name."""
    draft.keep("schedule", "cosine", f"{name.removesuffix('params.')}type = WarmupCosineLR")
    warmup = given.pop("warmup_num_steps", WARMUP)
    if warmup != AUTO:
        draft.keep("warmup_steps", whole(warmup), f"{name}warmup_num_steps")
    draft.note(
        "differs",
        "scheduler.type = WarmupCosineLR",
        "schedule.name: cosine warms up from a rate of 0 and ends at 0, with the run",
    )
    for key, value in given.items():
        kind: Kind = "off" if value == AUTO else "idle"
        draft.note(kind, written(f"{name}{key}", value), "the schedule cosine has no such argument")

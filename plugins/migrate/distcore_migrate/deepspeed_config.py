"""DeepSpeed's JSON: keys with an option of the strategy ``deepspeed``, keys taken as they are, keys refused."""

from __future__ import annotations

from typing import Any

from distcore import ConfigError
from distcore_migrate.draft import (
    OFF,
    Draft,
    Kind,
    Rule,
    Tree,
    apply,
    converted,
    fact,
    flag,
    instead,
    no_effect,
    none,
    to,
    whole,
    written,
)

AUTO = "auto"
OPTIONS = "strategy_options."
CONFIG = "strategy_options.config."
"""Where the strategy takes keys of DeepSpeed as they are."""
DEVICES = ("none", "cpu", "nvme")


def _option(name: str, convert: Any = None, auto: bool = False) -> Rule:
    """The option of that name; ``auto``: it knows the word, otherwise ``"auto"`` is DeepSpeed's own default."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value is None or (value == AUTO and not auto):
            draft.note("off", key)
        else:
            draft.set(f"{OPTIONS}{name}", AUTO if value == AUTO else converted(convert, key, value), key)

    return rule


def _as_it_is(draft: Draft, name: str, value: Any) -> None:
    if value is None or value == AUTO:
        draft.note("off", name)
        return
    draft.set(f"{CONFIG}{name}", value, name)
    draft.opaque.add(f"{CONFIG}{name}")


def _unless_auto(rule: Rule) -> Rule:
    def inner(draft: Draft, name: str, value: Any) -> None:
        if value == AUTO:
            draft.note("off", name)
        else:
            rule(draft, name, value)

    return inner


def _enabled(why: str, kind: Kind = "none") -> Rule:
    """A section that the strategy refuses where it is on."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        on = value.get("enabled") if isinstance(value, dict) else value
        draft.note(kind if on not in OFF else "off", name, why if on not in OFF else "")

    return rule


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
    option = name.partition(".")[2]
    for key, inner in section.items():
        if key == "device":
            _option(option)(draft, f"{name}.{key}", inner)
        elif key == "nvme_path":
            draft.set(f"{OPTIONS}nvme_path", str(inner), f"{name}.{key}")
        else:
            _as_it_is(draft, f"{name}.{key}", inner)


def _old_offload(option: str) -> Rule:
    def rule(draft: Draft, name: str, value: Any) -> None:
        if value in OFF:
            draft.note("off", name)
        else:
            draft.set(f"{OPTIONS}{option}", "cpu", name)

    return rule


def _loss_scale(draft: Draft, name: str, value: Any) -> None:
    if value in (0, AUTO, None):
        draft.note("off", name)
    else:
        _as_it_is(draft, name, value)


GONE = none("DeepSpeed has dropped it, in 0.19.7 at the latest")
SAVED = no_effect("checkpoints are distcore's: neutral, and exported whole")
ZERO_ROWS: dict[str, Rule] = {
    "stage": _unless_auto(fact("zero_stage", whole)),
    "offload_optimizer": _offload,
    "offload_param": _offload,
    "cpu_offload": _old_offload("offload_optimizer"),
    "cpu_offload_params": _old_offload("offload_param"),
    "cpu_offload_use_pin_memory": GONE,
    "overlap_comm": _option("overlap_comm", flag),
    "reduce_bucket_size": _option("reduce_bucket_size", whole, auto=True),
    "allgather_bucket_size": _option("allgather_bucket_size", whole),
    "round_robin_gradients": _option("round_robin_gradients", flag),
    "sub_group_size": _option("sub_group_size", whole),
    "stage3_prefetch_bucket_size": _option("stage3_prefetch_bucket_size", whole, auto=True),
    "stage3_param_persistence_threshold": _option("stage3_param_persistence_threshold", whole, auto=True),
    "stage3_max_live_parameters": _option("stage3_max_live_parameters", whole),
    "stage3_max_reuse_distance": _option("stage3_max_reuse_distance", whole),
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
    "initial_scale_power": _option("initial_scale_power", whole),
    "loss_scale_window": _option("loss_scale_window", whole),
    "hysteresis": _option("hysteresis", whole),
    "min_loss_scale": _option("min_loss_scale", whole),
}
"""Keys of ``fp16``; the others are taken as they are."""
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "lamb": "deepspeed-lamb", "lion": "lion", "sgd": "sgd"}
"""``optimizer.type`` to ``optimizer.name``; DeepSpeed's Adam decays weights as AdamW does, unless told otherwise."""
OPTIMIZER_ROWS: dict[str, Rule] = {
    "lr": _unless_auto(to("lr", float)),
    "betas": _unless_auto(lambda draft, name, value: _betas(draft, name, value)),
    "eps": _unless_auto(to("optimizer.eps", float)),
    "momentum": _unless_auto(to("optimizer.momentum", float)),
    "nesterov": _unless_auto(to("optimizer.nesterov", flag)),
    "weight_decay": _unless_auto(to("optimizer.weight_decay", float)),
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
            draft.note("differs", about, f"DeepSpeed takes {value}, whatever another source says: written as that")
            draft.values.pop(key)
            draft.origins.pop(key)
        draft.set(key, value, f"{about}: DeepSpeed's default")


def _optimizer(draft: Draft, name: str, value: Tree) -> None:
    kind, params = value.get("type"), value.get("params") or {}
    if kind is not None:
        draft.keep("deepspeed_optimizer", kind, f"{name}.type")
        _left_out(draft, name, params if params.get("torch_adam") is not True else params | {"weight_decay": 0.01})
    word = str(kind).lower()  # as DeepSpeed reads it
    if word in OPTIMIZERS:
        draft.set("optimizer.name", OPTIMIZERS[word], f"{name}.type")
    elif word == "muon":
        draft.note("instead", f"{name}.type = Muon", "written as adamw; --optimizer muon takes another strategy, such "
                   "as fsdp")  # fmt: skip
    elif kind is not None:
        draft.note("none", written(f"{name}.type", kind), "written as adamw; taken are Adam, AdamW, Lamb, Lion, SGD")
    apply(draft, OPTIMIZER_ROWS, params, "optimizer.params", f"{name}.params.")


def _scheduler(draft: Draft, name: str, value: Tree) -> None:
    kind, given = value.get("type"), dict(value.get("params") or {})
    if kind == "WarmupCosineLR":
        _cosine(draft, f"{name}.params.", given)
        return
    if kind not in ("WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest"):
        draft.note("instead", written(f"{name}.type", kind), "schedule.name says the schedule")
        draft.keep("other_schedule", kind, f"{name}.type")
        return
    draft.set(f"{OPTIONS}scheduler", kind, f"{name}.type")
    asked = {key: number for key, number in given.items() if number != AUTO}
    for key in given.keys() - asked.keys():
        draft.note("off", f"{name}.params.{key}")
    if kind.startswith("Warmup") and "warmup_num_steps" not in given:
        draft.keep("warmup_steps", WARMUP, f"{name}.params.warmup_num_steps, not given: DeepSpeed's default")
    if "warmup_num_steps" in asked:
        draft.keep("warmup_steps", whole(asked.pop("warmup_num_steps")), f"{name}.params.warmup_num_steps")
    if "warmup_max_lr" in asked:
        draft.set("lr", float(asked.pop("warmup_max_lr")), f"{name}.params.warmup_max_lr")
    if "total_num_steps" in asked:
        total = asked.pop("total_num_steps")
        draft.note("differs", written(f"{name}.params.total_num_steps", total), "the decay ends with the run itself")
    for key, number in asked.items():
        draft.set(f"{OPTIONS}scheduler_params.{key}", number, f"{name}.params.{key}")
    draft.keep("deepspeed_schedule", kind, f"{name}.type")
    if kind.startswith("Warmup"):
        draft.note("differs", written(f"{name}.type", kind), "kept as it is, so it spends two steps at the least rate, "
                   "schedule.name: linear one; the latter goes under any strategy")  # fmt: skip


def _cosine(draft: Draft, name: str, given: Tree) -> None:
    """Write DeepSpeed's cosine as the schedule of that name."""
    draft.keep("schedule", "cosine", f"{name.removesuffix('params.')}type = WarmupCosineLR")
    warmup = given.pop("warmup_num_steps", WARMUP)
    if warmup != AUTO:
        draft.keep("warmup_steps", whole(warmup), f"{name}warmup_num_steps")
    draft.note("differs", "scheduler.type = WarmupCosineLR", "schedule.name: cosine warms up from a rate of 0 and ends "
               "at 0, with the run")  # fmt: skip
    for key, value in given.items():
        kind: Kind = "off" if value == AUTO else "idle"
        draft.note(kind, written(f"{name}{key}", value), "the schedule cosine has no such argument")


def _zero(draft: Draft, name: str, value: Tree) -> None:
    rows = dict.fromkeys(value, _as_it_is) | {key: row for key, row in ZERO_ROWS.items() if key in value}
    apply(draft, rows, value, name, f"{name}.")


def _half(draft: Draft, name: str, value: Tree) -> None:
    rows = dict.fromkeys(value, _as_it_is) | {key: row for key, row in FP16_ROWS.items() if key in value}
    apply(draft, rows, value, name, f"{name}.")


def _clip(draft: Draft, name: str, value: Any) -> None:
    draft.set("clip.norm", converted(float, name, value) or None, name)


MESH = "--strategy mesh splits layers over ranks (tensor, sequence and context parallel)"
REFUSED = "there is no such training here"
ROWS: dict[str, Rule] = {
    "train_batch_size": _unless_auto(fact("global_batch", whole)),
    "train_micro_batch_size_per_gpu": _unless_auto(fact("per_device", whole)),
    "gradient_accumulation_steps": _unless_auto(fact("accumulation", whole)),
    "gradient_clipping": _unless_auto(_clip),
    "zero_optimization": _zero,
    "fp16": _half,
    "bf16": _half,
    "bfloat16": _half,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "communication_data_type": _option("communication_data_type"),
    "activation_checkpointing": _as_it_is,
    "aio": _as_it_is,
    "checkpoint": _as_it_is,
    "comet": _as_it_is,
    "comms_logger": _as_it_is,
    "csv_monitor": _as_it_is,
    "data_types": _as_it_is,
    "disable_python_gc": _as_it_is,
    "dump_state": _as_it_is,
    "flops_profiler": _as_it_is,
    "gradient_predivide_factor": _as_it_is,
    "log_level": _as_it_is,
    "memory_breakdown": _as_it_is,
    "prescale_gradients": _as_it_is,
    "steps_per_print": _as_it_is,
    "timers": _as_it_is,
    "tensorboard": _as_it_is,
    "wall_clock_breakdown": _as_it_is,
    "wandb": _as_it_is,
    "zero_allow_untested_optimizer": _as_it_is,
    "zero_force_ds_cpu_optimizer": no_effect("the strategy says it, by the optimizer that is used"),
    "dataloader_drop_last": none("the last step of an epoch takes the rows that are left"),
    "amp": _enabled("there is no apex here; --precision bf16 or fp16", "instead"),
    "autotuning": _enabled("distcore tune CONFIG finds the fastest setting", "instead"),
    "torch_autocast": _enabled("--precision bf16 or fp16", "instead"),
    "data_efficiency": _enabled("the sampler is distcore's"),
    "curriculum_learning": _enabled("the sampler is distcore's"),
    "hybrid_engine": _enabled(REFUSED),
    "compression_training": none(REFUSED),
    "compile": instead("--compile on, or --compile regions, compiles the model"),
    "expert_parallel": none(REFUSED),
    "use_data_before_expert_parallelism": none(REFUSED),
    "weight_quantization": none(REFUSED),
    "vocabulary_size": none("the model knows its vocabulary"),
    "managed_gradient_accumulation": none("the loop accumulates", off=(True,)),
    "seq_parallel_communication_data_type": instead(MESH),
    "elasticity": _enabled("a checkpoint goes on at any number of ranks"),
    "eigenvalue": _enabled(REFUSED),
    "progressive_layer_drop": _enabled(REFUSED),
    "quantize_training": _enabled(REFUSED),
    "sparse_attention": GONE,
    "sparse_gradients": none("gradients are dense"),
    "pipeline": instead(MESH),
    "tensor_parallel": instead(MESH),
    "sequence_parallel_size": instead(MESH, off=(1,)),
    "gradient_allreduce_op": none("gradients are averaged over ranks", off=("mean",)),
    "disable_allgather": none("ZeRO gathers what it has spread"),
}
"""Keys at the top."""


def read(draft: Draft, tree: Tree, source: str) -> None:
    """Put the keys of the JSON into ``draft``; raises ConfigError for a section that is none."""
    if isinstance(zero := tree.get("zero_optimization"), bool) or str(zero).lower() in ("true", "false"):
        tree = tree | {"zero_optimization": {"stage": int(flag(zero))}}  # the form of DeepSpeed's first versions
        draft.note("differs", written("zero_optimization", zero), f"stage {int(flag(zero))}, as DeepSpeed reads it")
    for name in ("zero_optimization", "fp16", "bf16", "bfloat16", "optimizer", "scheduler"):
        if name in tree and not isinstance(tree[name], dict):
            raise ConfigError(f"{source}: {name} = {tree[name]!r}: expected keys and values")
    apply(draft, ROWS, tree, "DeepSpeed's config")
    if "zero_stage" not in draft.facts:
        draft.keep("zero_stage", 0, "zero_optimization.stage (default)")


def choose(draft: Draft, origin: str, with_arguments: bool) -> None:
    """Set the strategy ``deepspeed`` and its options by the facts; ``origin`` names the setting that asks for it.

    ``with_arguments``: the Trainer's arguments say the schedule; otherwise, as the strategy reads the same file, it is
    constant where the file has an optimizer and no scheduler.
    """
    draft.set("strategy", "deepspeed", origin)
    is_constant = draft.take("deepspeed_optimizer") and not draft.take("other_schedule")
    if (stage := draft.take("zero_stage")) is not None:
        if stage == 0 and draft.values.get("precision", "fp32") != "fp32":
            draft.note_fact("differs", "zero_stage", "in 16 bits written as 1, which does the same work")
            stage = 1
        draft.set(f"{OPTIONS}stage", stage, draft.origin("zero_stage"))
    for name in ("offload_optimizer", "offload_param", "nvme_path"):
        if (value := draft.take(f"zero_{name}")) is not None:
            draft.set(f"{OPTIONS}{name}", value, draft.origin(f"zero_{name}"))
    if draft.take("deepspeed_schedule"):
        draft.note_fact("idle", "schedule", "DeepSpeed's scheduler takes its place")
        draft.facts.pop("schedule", None)
        warms_up = str(draft.facts["deepspeed_schedule"].value).startswith("Warmup")
        if warms_up and not (draft.take("warmup_steps") or draft.take("warmup_ratio")):
            draft.note_fact("off", "warmup_steps")
            draft.set("schedule.warmup_steps", 1, "the least that DeepSpeed's warm-up takes")
    elif is_constant and not with_arguments and "schedule" not in draft.facts:
        draft.set("schedule.name", "constant", "no scheduler in DeepSpeed's config")

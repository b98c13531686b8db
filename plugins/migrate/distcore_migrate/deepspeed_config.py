"""DeepSpeed's JSON: keys with an option of the strategy ``deepspeed``, keys taken as
they are, keys refused.
"""

from __future__ import annotations

from typing import Any

from distcore import ConfigError
from distcore_migrate.deepspeed_optimizer import optimizer_section, scheduler_section
from distcore_migrate.deepspeed_rules import GONE, OPTIONS, as_it_is, enabled, option, unless_auto
from distcore_migrate.deepspeed_zero import half_section, zero_section
from distcore_migrate.draft import (
    Draft,
    Rule,
    Tree,
    apply,
    converted,
    fact,
    flag,
    instead,
    no_effect,
    none,
    positive_or_none,
    whole,
    written,
)


def _clip(draft: Draft, name: str, value: Any) -> None:
    draft.set("clip.norm", converted(positive_or_none, name, value), name)


MESH = "--strategy mesh splits layers over ranks (tensor, sequence and context parallel)"
REFUSED = "there is no such training here"
ROWS: dict[str, Rule] = {
    "train_batch_size": unless_auto(fact("global_batch", whole)),
    "train_micro_batch_size_per_gpu": unless_auto(fact("per_device", whole)),
    "gradient_accumulation_steps": unless_auto(fact("accumulation", whole)),
    "gradient_clipping": unless_auto(_clip),
    "zero_optimization": zero_section,
    "fp16": half_section,
    "bf16": half_section,
    "bfloat16": half_section,
    "optimizer": optimizer_section,
    "scheduler": scheduler_section,
    "communication_data_type": option("communication_data_type"),
    "activation_checkpointing": as_it_is,
    "aio": as_it_is,
    "checkpoint": as_it_is,
    "comet": as_it_is,
    "comms_logger": as_it_is,
    "csv_monitor": as_it_is,
    "data_types": as_it_is,
    "disable_python_gc": as_it_is,
    "dump_state": as_it_is,
    "flops_profiler": as_it_is,
    "gradient_predivide_factor": no_effect("gradients are a mean over ranks"),
    "log_level": as_it_is,
    "memory_breakdown": as_it_is,
    "prescale_gradients": no_effect("gradients are a mean over ranks"),
    "steps_per_print": as_it_is,
    "timers": as_it_is,
    "tensorboard": as_it_is,
    "wall_clock_breakdown": as_it_is,
    "wandb": as_it_is,
    "zero_allow_untested_optimizer": as_it_is,
    "zero_force_ds_cpu_optimizer": no_effect("the strategy says it, by the optimizer that is used"),
    "dataloader_drop_last": none("the last step of an epoch takes the rows that are left"),
    "amp": enabled("there is no apex here; --precision bf16 or fp16", "instead"),
    "autotuning": enabled("distcore tune CONFIG finds the fastest setting", "instead"),
    "torch_autocast": enabled("--precision bf16 or fp16", "instead"),
    "data_efficiency": enabled("the sampler is distcore's"),
    "curriculum_learning": enabled("the sampler is distcore's"),
    "hybrid_engine": enabled(REFUSED),
    "compression_training": none(REFUSED),
    "compile": instead("--compile on, or --compile regions, compiles the model"),
    "expert_parallel": none(REFUSED),
    "use_data_before_expert_parallelism": none(REFUSED),
    "weight_quantization": none(REFUSED),
    "vocabulary_size": none("the model knows its vocabulary"),
    "managed_gradient_accumulation": none("the loop accumulates", off=(True,)),
    "seq_parallel_communication_data_type": instead(MESH),
    "elasticity": enabled("a checkpoint goes on at any number of ranks"),
    "eigenvalue": enabled(REFUSED),
    "progressive_layer_drop": enabled(REFUSED),
    "quantize_training": enabled(REFUSED),
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
    zero = tree.get("zero_optimization")
    # The form of DeepSpeed's first versions.
    if str(zero).lower() in ("true", "false"):
        tree = tree | {"zero_optimization": {"stage": int(flag(zero))}}
        draft.note(
            "differs",
            written("zero_optimization", zero),
            f"stage {int(flag(zero))}, as DeepSpeed reads it",
        )
    for name in ("zero_optimization", "fp16", "bf16", "bfloat16", "optimizer", "scheduler"):
        if name in tree and not isinstance(tree[name], dict):
            raise ConfigError(f"{source}: {name} = {tree[name]!r}: expected keys and values")
    apply(draft, ROWS, tree, "DeepSpeed's config")
    if "zero_stage" not in draft.facts:
        draft.keep("zero_stage", 0, "zero_optimization.stage (default)")


def choose(draft: Draft, origin: str, with_arguments: bool) -> None:
    """Set the strategy ``deepspeed`` and its options by the facts; ``origin`` names the setting
    that asks for it.

    ``with_arguments``: the Trainer's arguments say the schedule; otherwise, as the strategy reads
    the same file, it is constant where the file has an optimizer and no scheduler.
    """
    draft.set("strategy", "deepspeed", origin)
    is_constant = draft.take("deepspeed_optimizer") and not draft.take("other_schedule")
    if (stage := draft.take("zero_stage")) is not None:
        if stage == 0 and draft.values.get("precision", "fp32") != "fp32":
            draft.note_fact(
                "differs", "zero_stage", "in 16 bits written as 1, which does the same work"
            )
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

"""Keys of a DeepSpeed JSON that would fail in a rank, or silently change results; idle options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distcore import RunConfig
from distcore_deepspeed.json_config import ZERO, Tree, UserConfig, get
from distcore_deepspeed.optimizers import optimizer_type

OFFLOADED = f"{ZERO}.offload_optimizer"
MICS = (
    "DeepSpeed 0.19.8 dropped MiCS; take it out, and zero_hpz_partition_size keeps gathers inside"
    " of a machine"
)
LOW_PRECISION = "master weights and gradients are fp32 here, and so are checkpoints; take it out"
QUANTIZED = "it quantizes by CUDA kernels, and there is no GPU; take it out"

Test = Callable[[Any, Tree, RunConfig], bool]
"""Tells if a key's value is refused, from it, the whole config of DeepSpeed and distcore's."""


def _is_on(value: Any, tree: Tree, config: RunConfig) -> bool:
    return bool(value)


def _is_not_one(value: Any, tree: Tree, config: RunConfig) -> bool:
    return bool(value != 1)


def _is_present(value: Any, tree: Tree, config: RunConfig) -> bool:
    return True


def _scatters(value: Any, tree: Tree, config: RunConfig) -> bool:
    """Return True for a key that is set, if gradients go to the rank of their partition alone."""
    section = tree[ZERO]
    return bool(value and section["stage"] >= 2 and section.get("reduce_scatter", True))


def _lacks_gpu(value: Any, tree: Tree, config: RunConfig) -> bool:
    return bool(value) and config.device == "cpu"


def _is_below_stage_3(value: Any, tree: Tree, config: RunConfig) -> bool:
    return bool(value) and tree[ZERO]["stage"] != 3


def _leaves_out_the_norm(value: Any, tree: Tree, config: RunConfig) -> bool:
    return value is False and config.clip.norm is not None


def _leaves_ranks_over(value: Any, tree: Tree, config: RunConfig) -> bool:
    """Return True if groups of ``value`` ranks do not use all ranks, whose number is known."""
    if not isinstance(value, int) or not isinstance(config.nproc, int):
        return False
    return value > 1 and config.nproc % value != 0


@dataclass(frozen=True)
class _Refusal:
    """One key, the values of it that are refused, and why."""

    path: str
    """Dotted path of the key in DeepSpeed's config."""
    reason: str
    """The end of the message: why, and what to do."""
    is_wrong: Test = _is_on
    """Called for a key that has a value."""


REFUSALS = (
    _Refusal(
        "gradient_predivide_factor",
        "stages 2 and 3 refuse it or divide by the number of ranks twice; take it out, gradients"
        " are a mean over ranks",
        _is_not_one,
    ),
    _Refusal(
        "prescale_gradients",
        f"stages 2 and 3 only take it with {ZERO}.reduce_scatter=false; take it out",
        _scatters,
    ),
    _Refusal(
        f"{OFFLOADED}.ratio",
        "an AdamW of DeepSpeed's own steps the rest, whose state no checkpoint has; take it out",
        _is_not_one,
    ),
    _Refusal(
        f"{OFFLOADED}.super_offload", "no checkpoint has the state of its processes; take it out"
    ),
    _Refusal(
        f"{ZERO}.zenflow",
        "it delays updates, and no checkpoint has the delayed ones; take it out",
        _is_present,
    ),
    _Refusal(f"{ZERO}.legacy_stage1", "DeepSpeed dropped it in 0.5.9; take it out"),
    _Refusal(f"{ZERO}.mics_shard_size", MICS, _is_present),
    _Refusal(f"{ZERO}.mics_hierarchical_params_gather", MICS, _is_present),
    _Refusal(
        f"{ZERO}.zero_quantized_nontrainable_weights",
        "frozen weights lose their values, which checkpoints need; take it out",
    ),
    *(
        _Refusal(f"{ZERO}.{name}", reason, test)
        for name in ("zero_quantized_weights", "zero_quantized_gradients")
        for reason, test in (
            (QUANTIZED, _lacks_gpu),
            ("DeepSpeed ignores it below stage 3; take it out, or use stage=3", _is_below_stage_3),
        )
    ),
    _Refusal(
        f"{ZERO}.zero_hpz_partition_size",
        "must divide the number of ranks, which --nproc sets",
        _leaves_ranks_over,
    ),
    _Refusal(
        f"{ZERO}.compute_grad_norm",
        "clipping needs the norm; take it out, or set clip.norm=null",
        _leaves_out_the_norm,
    ),
    _Refusal("bf16.bf16_master_weights_and_grads", LOW_PRECISION),
    _Refusal("bf16.bf16_optimizer_states", LOW_PRECISION),
    _Refusal("fp16.fp16_master_weights_and_grads", LOW_PRECISION),
    _Refusal(
        "compile.deepcompile", "distcore compiles the model; take it out, and use --compile on"
    ),
    _Refusal(
        "weight_quantization.quantized_initialization",
        "training needs whole weights; take it out",
        _is_present,
    ),
)


def unsupported(tree: Tree, config: RunConfig) -> list[str]:
    """Return a message for each key of DeepSpeed's config that cannot be trained with."""
    messages = []
    for refusal in REFUSALS:
        value = get(tree, refusal.path)
        if value is not None and refusal.is_wrong(value, tree, config):
            messages.append(f"{refusal.path} = {value!r}: {refusal.reason}")
    return messages


def idle_option(options: Any, user: UserConfig, config: RunConfig) -> str | None:
    """Return a message for the first of ``options`` that would have no effect, or ``None``.

    ``options`` are the strategy's, and ``user`` is the config that they make. Keys of a JSON may be
    idle: a file often serves several stages.
    """
    stage = user.stage
    options_of_stage_3 = [name for name in vars(options) if name.startswith("stage3_")]
    needs = {
        "stages 1 and 2": (stage in (1, 2), ("round_robin_gradients", "allgather_bucket_size")),
        "stages 1 to 3": (stage > 0, ("overlap_comm", "reduce_bucket_size")),
        "stage 3": (stage == 3, ("sub_group_size", *options_of_stage_3)),
        "precision=fp16": (
            config.precision == "fp16",
            ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
        ),
        "strategy_options.activation_checkpointing=true": (
            options.activation_checkpointing,
            ("cpu_checkpointing",),
        ),
        "an offload to nvme": (not user.keeps_masters, ("nvme_path",)),
        "strategy_options.scheduler": (user.scheduler is not None, ("scheduler_params",)),
        "an optimizer of DeepSpeed, such as optimizer.name=deepspeed-adamw": (
            optimizer_type(config, user) is not None,
            ("optimizer_params",),
        ),
    }
    for condition, (is_met, names) in needs.items():
        for name in names:
            if not is_met and getattr(options, name):
                return f"strategy_options.{name}: has no effect without {condition}; take it out"
    return None

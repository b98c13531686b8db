"""What distcore's config and the strategy's options say about DeepSpeed's config, and what they may not say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

from distcore import ConfigError, Run, RunConfig
from distcore_deepspeed import backend, ops
from distcore_deepspeed.optimizers import (
    LATER,
    check_optimizer,
    check_scheduler,
    optimizer_claims,
    optimizer_type,
    scheduler_claims,
)
from distcore_deepspeed.sections import ZERO, unknown_keys, wrong_values
from distcore_deepspeed.settings import Claim, Tree, fill, origin

if TYPE_CHECKING:
    from distcore_deepspeed.strategy import DeepSpeedStrategy

ZERO_OPTIONS = (
    "overlap_comm",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "round_robin_gradients",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
"""Options that are keys of ``zero_optimization`` by the same name."""
FP16_OPTIONS = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
SIZES = {"reduce_bucket_size": 1.0, "stage3_prefetch_bucket_size": 0.9}
"""What "auto" is, in squares of the hidden size."""
BY_HIDDEN_SIZE = (*(f"{ZERO}.{name}" for name in SIZES), f"{ZERO}.stage3_param_persistence_threshold")


OF_TRAINING = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    | {"optimizer", "scheduler"}
)
"""Sections that say nothing of a run that only evaluates."""


def check(options: DeepSpeedStrategy, config: RunConfig) -> None:
    """Raise ConfigError, one line, for whatever can be known to go wrong before ranks start to train."""
    if config.precision != "fp32" and options.zero_stage == 0:
        raise ConfigError(
            f"strategy_options.stage = 0 with precision = {config.precision!r}: DeepSpeed's optimizer is a step ahead "
            "there and the result is wrong; use stage=1, which is as fast"
        )
    kind = optimizer_type(config, options.given)
    check_optimizer(kind, config.device)
    _check_adam(options, kind)
    check_scheduler(config, options.given, kind)
    _check_tree(options, config, options.given)


def _check_adam(options: DeepSpeedStrategy, kind: str | None) -> None:
    """Refuse DeepSpeed's own Adam where it is asked for by name and cannot be compiled."""
    asked = options.given.get("optimizer", {}).get("params", {}).get("torch_adam") is False
    builder = ops.adam(offloaded(options, "offload_optimizer"))
    if asked and kind in ("Adam", "AdamW") and not ops.can_load(builder):
        raise ConfigError(
            f"optimizer.params.torch_adam = false: DeepSpeed's {builder.name} cannot be compiled here (no C++ compiler "
            "or ninja); install them, or leave torch_adam out"
        )


def check_evaluation(options: DeepSpeedStrategy, config: RunConfig) -> None:
    """The same where ranks only evaluate: there is no optimizer, and the batch is as large as it happens to be."""
    _check_tree(options, config, for_evaluation(options.given))


def for_evaluation(given: Tree) -> Tree:
    """Return ``given`` without what only matters to training."""
    return {key: value for key, value in given.items() if key not in OF_TRAINING}


def _check_tree(options: DeepSpeedStrategy, config: RunConfig, given: Tree) -> None:
    if config.precision == "fp16" and config.device == "cpu" and not backend.fp16_on_cpu():
        raise ConfigError("precision = 'fp16': DeepSpeed has no fp16 on a CPU; use --precision bf16 or fp32")
    where, ranks = origin(options.config), config.nproc if isinstance(config.nproc, int) else 1
    claims = [*run_claims(options, config, ranks), *scheduler_claims(config, given, None)]
    unknown = unknown_keys(_typed(config, given), config.device, offloaded(options, "offload_optimizer"))
    tree = fill(given, claims, where, later=(*LATER, *BY_HIDDEN_SIZE), unknown=unknown)
    _check_offload(tree[ZERO])
    if wrong := list(wrong_values(tree)):
        raise ConfigError(f"{where}: {'; '.join(wrong)}")
    backend.import_ahead()


def _typed(config: RunConfig, given: Tree) -> Tree:
    """``given`` with the type of an optimizer that is named elsewhere."""
    section = given.get("optimizer")
    return given | ({"optimizer": section | {"type": optimizer_type(config, given)}} if section else {})


def resolve(options: DeepSpeedStrategy, run: Run, model: nn.Module, training: bool = True) -> Tree:
    """Return DeepSpeed's config with nothing left to choose."""
    config, given = run.config, options.given if training else for_evaluation(options.given)
    claims = [
        *run_claims(options, config, run.world.size),
        *scheduler_claims(config, given, run.total_steps),
        *_size_claims(model),
        *_adam_claims(options, config, run.world.is_main),
    ]
    tree = fill(given, claims, origin(options.config))
    if tree.get("scheduler", {}).get("params", {}).get("warmup_num_steps", 1) < 1:
        raise ConfigError("schedule.warmup_steps = 0: DeepSpeed's warm-up schedulers need at least 1; set it")
    if options.zero_stage == 0:
        tree["gradient_clipping"] = 0.0  # there the strategy clips, to report the norm
    return tree


def run_claims(options: DeepSpeedStrategy, config: RunConfig, ranks: int) -> list[Claim]:
    """What follows from the config and the options alone."""
    micro, norm = int(config.micro_batch_size), config.clip.norm
    source = "global_batch_size / (micro_batch_size * ranks)"
    return [
        Claim("train_batch_size", config.global_batch_size, "global_batch_size"),
        Claim("train_micro_batch_size_per_gpu", micro, "micro_batch_size"),
        Claim("gradient_accumulation_steps", max(1, config.global_batch_size // (micro * ranks)), source),
        Claim("gradient_clipping", norm or 0.0, "clip.norm"),  # always: DeepSpeed clips at 1.0 if nothing is said
        *(Claim(f"{name}.enabled", config.precision == name, "precision") for name in ("bf16", "fp16")),
        Claim("torch_autocast.enabled", False, "precision (DeepSpeed's own bf16 or fp16)", "match"),
        Claim("gradient_allreduce_op", "mean", "the strategy's mean over ranks", "match"),
        Claim("managed_gradient_accumulation", True, "the loop's accumulation", "match"),
        Claim("data_efficiency.enabled", False, "the sampler of distcore", "match"),
        Claim("hybrid_engine.enabled", False, "the training of distcore", "match"),
        Claim("autotuning.enabled", False, "the training of distcore", "match"),
        Claim("timers.throughput.enabled", False, "the progress line", "default"),  # it waits for the device
        *_option_claims(options),
        *_offload_claims(options, config),
        *optimizer_claims(config, options.given),
        *([Claim("data_types.grad_accum_dtype", "fp32", "precision", "default")] if config.precision == "bf16" else []),
    ]


def _option_claims(options: DeepSpeedStrategy) -> list[Claim]:
    claims = [Claim(f"{ZERO}.stage", options.zero_stage, "strategy_options.stage")]
    named = [(f"{ZERO}.{name}", name) for name in ZERO_OPTIONS] + [(f"fp16.{name}", name) for name in FP16_OPTIONS]
    named += [("communication_data_type", "communication_data_type")]
    named += [("activation_checkpointing.cpu_checkpointing", "cpu_checkpointing")]
    for path, name in named:
        if (value := getattr(options, name)) is not None:
            claims.append(Claim(path, value, f"strategy_options.{name}"))
    if options.zero_stage == 3:  # DeepSpeed's own default leaves the whole of a small model on every rank
        claims.append(Claim(f"{ZERO}.stage3_param_persistence_threshold", "auto", "the hidden size", "default"))
    return claims


def _offload_claims(options: DeepSpeedStrategy, config: RunConfig) -> list[Claim]:
    claims = []
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(options, name)
        if device is not None:
            claims.append(Claim(f"{ZERO}.{name}.device", device, f"strategy_options.{name}"))
        if device == "nvme":
            claims.append(Claim(f"{ZERO}.{name}.nvme_path", options.nvme_path, "strategy_options.nvme_path"))
    if offloaded(options, "offload_optimizer") != "none" and optimizer_type(config, options.given) is None:
        claims.append(Claim("zero_force_ds_cpu_optimizer", False, "optimizer.name (torch's AdamW)"))
    return claims


def offloaded(options: DeepSpeedStrategy, what: str) -> str:
    """Where ``offload_optimizer`` or ``offload_param`` puts things: none, cpu or nvme."""
    given = options.given.get(ZERO, {}).get(what, {}).get("device")
    return str(getattr(options, what) or given or "none")


def _size_claims(model: nn.Module) -> list[Claim]:
    hidden = _hidden_size(model)
    if hidden is None:  # then DeepSpeed's own default is the best that can be said
        fields = DeepSpeedZeroConfig.model_fields.values()
        defaults = {field.alias: field.default for field in fields} | {"reduce_bucket_size": int(5e8)}
        return [Claim(path, int(defaults[path.partition(".")[2]]), "", "auto") for path in BY_HIDDEN_SIZE]
    sizes = {name: int(factor * hidden * hidden) for name, factor in SIZES.items()}
    sizes["stage3_param_persistence_threshold"] = 10 * hidden
    return [Claim(f"{ZERO}.{name}", value, "the model's hidden size", "auto") for name, value in sizes.items()]


def _hidden_size(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    sizes = getattr(config, "hidden_sizes", None)
    found = getattr(config, "hidden_size", None) or (max(sizes) if sizes else None)
    return int(found) if found else None


def _adam_claims(options: DeepSpeedStrategy, config: RunConfig, tell: bool) -> list[Claim]:
    if optimizer_type(config, options.given) not in ("Adam", "AdamW"):
        return []
    use = ops.torch_adam(config.device, offloaded(options, "offload_optimizer"), tell)
    return [Claim("optimizer.params.torch_adam", use, "", "default")]


def _check_offload(section: Tree) -> None:
    """Refuse offload that DeepSpeed would accept and not do, or that lacks something."""
    stage = section["stage"]
    for name in ("offload_optimizer", "offload_param"):
        offload = section.get(name) or {}
        device = offload.get("device", "none")
        if device == "nvme" and not offload.get("nvme_path"):
            raise ConfigError(
                f"{ZERO}.{name}.device = 'nvme': needs strategy_options.nvme_path, a folder on a fast disk"
            )
        lowest = 3 if name == "offload_param" or device == "nvme" else 1
        if device != "none" and stage < lowest:
            raise ConfigError(
                f"{ZERO}.{name}.device = {device!r}: DeepSpeed ignores it at stage {stage}; use stage={lowest}"
            )
        if device == "nvme" and (lacking := ops.lacking_for_nvme()):
            raise ConfigError(f"{ZERO}.{name}.device = 'nvme': DeepSpeed's async_io needs {lacking}; install it")


def model_dtype(config: RunConfig) -> torch.dtype:
    """What parameters are kept in for forward and backward."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]

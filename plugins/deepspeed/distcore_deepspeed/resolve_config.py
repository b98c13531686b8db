"""Derive DeepSpeed's config from a run: batches, precision, rates, clipping, model size."""

from __future__ import annotations

from typing import Any

from torch import nn

from distcore import ConfigError, Run, RunConfig
from distcore_deepspeed import ops
from distcore_deepspeed.json_config import AUTO, ZERO, Setting, Tree, UserConfig, fill
from distcore_deepspeed.library import DeepSpeedZeroConfig
from distcore_deepspeed.optimizers import optimizer_settings, optimizer_type, scheduler_settings

BUCKETS = {"reduce_bucket_size": 1.0, "stage3_prefetch_bucket_size": 0.9}
"""Keys whose "auto" is a multiple of the squared hidden size, and the factor."""
SPLITS = ("tensor_parallel.autotp_size", "sequence_parallel_size")
"""Keys that split a layer over ranks, which is the work of the strategy ``mesh``."""
PERSISTENCE = f"{ZERO}.stage3_param_persistence_threshold"
BY_HIDDEN_SIZE = (*(f"{ZERO}.{name}" for name in BUCKETS), PERSISTENCE)
"""Keys whose "auto" needs the model."""


def resolve(user: UserConfig, run: Run, model: nn.Module, training: bool = True) -> Tree:
    """Return DeepSpeed's config with every "auto" filled in.

    ``model`` is the whole model, for its hidden size. Without ``training``, keys that only training
    reads are left out. Raises ConfigError, one line, for contradictions.
    """
    config = run.config
    user = user if training else user.for_evaluation()
    settings = [
        *derived_settings(user, config, run.world.size),
        *scheduler_settings(config, user, run.total_steps),
        *_bucket_settings(model),
        *_adam_settings(user, config, run.world.is_main),
    ]
    tree = fill(user, settings)
    if not training:
        tree.pop("optimizer", None)
        tree.pop("scheduler", None)
        return tree
    scheduler_arguments = tree.get("scheduler", {}).get("params", {})
    # DeepSpeed would raise a ValueError on every rank, without the name of distcore's setting.
    if scheduler_arguments.get("warmup_num_steps", 1) < 1:
        raise ConfigError(
            "schedule.warmup_steps = 0: DeepSpeed's warm-up schedulers need at least 1; set it"
        )
    if user.stage == 0:
        # At stage 0 the strategy clips, so that it can report the norm.
        tree["gradient_clipping"] = 0.0
    return tree


def resolve_section(user: UserConfig, config: RunConfig, ranks: int, model: nn.Module) -> Tree:
    """Return DeepSpeed's section ``zero_optimization`` with every "auto" filled in.

    The number of steps need not be known.
    """
    settings = [*derived_settings(user, config, ranks), *_bucket_settings(model)]
    # The optimizer's and the scheduler's sections may have an "auto" that only a run can fill in.
    section: Tree = fill(user.for_evaluation(), settings)[ZERO]
    return section


def derived_settings(user: UserConfig, config: RunConfig, ranks: int) -> list[Setting]:
    """Return the settings that follow from distcore's config and the user's options."""
    rows = config.global_batch_size
    if config.exact is not None:
        # Rows need not divide, and DeepSpeed does nothing with these numbers but to compare them.
        micro = -(-rows // ranks)
        rows = micro * ranks
        source_of_micro = "exact (global_batch_size / ranks)"
    elif config.micro_batch_size == "auto":
        # With micro-batches by tokens, their number differs from step to step: DeepSpeed
        # sees a single one.
        micro = max(1, config.global_batch_size // ranks)
        source_of_micro = "micro_batch_size (auto: global_batch_size / ranks)"
    else:
        micro = config.micro_batch_size
        source_of_micro = "micro_batch_size"
    accumulation = max(1, rows // (micro * ranks))
    source_of_accumulation = "global_batch_size / (micro_batch_size * ranks)"
    is_bf16 = config.precision == "bf16"
    is_fp16 = config.precision == "fp16"
    source_of_splits = "the strategy's data parallel ranks (mesh splits layers)"
    return [
        Setting("train_batch_size", rows, "global_batch_size"),
        Setting("train_micro_batch_size_per_gpu", micro, source_of_micro),
        Setting("gradient_accumulation_steps", accumulation, source_of_accumulation),
        # Always, because DeepSpeed's default clips at 1.0.
        Setting("gradient_clipping", config.clip.norm or 0.0, "clip.norm"),
        Setting("bf16.enabled", is_bf16, "precision"),
        Setting("fp16.enabled", is_fp16, "precision"),
        Setting(
            "torch_autocast.enabled", False, "precision (DeepSpeed's own bf16 or fp16)", "match"
        ),
        # The loss is scaled for a mean over ranks: a sum would train with another learning rate.
        Setting("gradient_allreduce_op", "mean", "the strategy's mean over ranks", "match"),
        Setting("gradient_allreduce_op", user.gradients, "", "default"),
        Setting("managed_gradient_accumulation", True, "the loop's accumulation", "match"),
        Setting("data_efficiency.enabled", False, "the sampler of distcore", "match"),
        Setting("hybrid_engine.enabled", False, "the training of distcore", "match"),
        Setting("autotuning.enabled", False, "the training of distcore", "match"),
        *(Setting(key, 1, source_of_splits, "match") for key in SPLITS),
        # DeepSpeed's timer waits for the device at each step.
        Setting("timers.throughput.enabled", False, "the progress line", "default"),
        *user.options,
        Setting(f"{ZERO}.stage", user.stage, "", "default"),
        *_memory_settings(user, config),
        *_own_optimizer(config, user),
        *optimizer_settings(config, user),
    ]


def _memory_settings(user: UserConfig, config: RunConfig) -> list[Setting]:
    """Return the settings of what stays whole at stage 3, and of gradients in bf16."""
    settings = []
    if user.stage == 3:
        # DeepSpeed's own default replicates all of a small model.
        settings.append(Setting(PERSISTENCE, AUTO, "the hidden size", "default"))
    if config.precision == "bf16":
        settings.append(Setting("data_types.grad_accum_dtype", "fp32", "precision", "default"))
    return settings


def _own_optimizer(config: RunConfig, user: UserConfig) -> list[Setting]:
    """Return the settings with which DeepSpeed accepts any optimizer of distcore."""
    if optimizer_type(config, user) is not None:
        return []
    source = "optimizer.name (built by distcore)"
    is_tested = config.optimizer.name in ("adam", "adamw")
    settings = [] if is_tested else [Setting("zero_allow_untested_optimizer", True, source)]
    if user.offload("offload_optimizer") != "none":
        settings.append(Setting("zero_force_ds_cpu_optimizer", False, source))
    return settings


def _bucket_settings(model: nn.Module) -> list[Setting]:
    """Return the sizes of buckets that follow from the model's hidden size.

    A model without a hidden size has DeepSpeed's own defaults.
    """
    hidden_size = _hidden_size(model)
    if hidden_size is None:
        return _default_bucket_settings()
    sizes = {PERSISTENCE: 10 * hidden_size}
    for name, factor in BUCKETS.items():
        sizes[f"{ZERO}.{name}"] = int(factor * hidden_size * hidden_size)
    source = "the model's hidden size"
    return [Setting(path, size, source, "auto") for path, size in sizes.items()]


def _default_bucket_settings() -> list[Setting]:
    """Return DeepSpeed's own defaults of the sizes that have an "auto"."""
    fields = DeepSpeedZeroConfig.model_fields.values()
    defaults = {field.alias: field.default for field in fields}
    # The only one of these fields without an alias.
    defaults["reduce_bucket_size"] = int(5e8)
    settings = []
    for path in BY_HIDDEN_SIZE:
        _, _, name = path.partition(".")
        settings.append(Setting(path, int(defaults[name]), "", "auto"))
    return settings


def _hidden_size(model: nn.Module) -> int | None:
    """Return the hidden size of a transformers model, the largest of several; ``None``: none."""
    config: Any = getattr(model, "config", None)
    size = getattr(config, "hidden_size", None)
    if size:
        return int(size)
    sizes = getattr(config, "hidden_sizes", None)
    return int(max(sizes)) if sizes else None


def _adam_settings(user: UserConfig, config: RunConfig, logs: bool) -> list[Setting]:
    """Return the setting that chooses between torch's Adam and DeepSpeed's."""
    if optimizer_type(config, user) not in ("Adam", "AdamW"):
        return []
    uses_torch = ops.uses_torch_adam(config.device, user.offload("offload_optimizer"), logs)
    return [Setting("optimizer.params.torch_adam", uses_torch, "", "default")]

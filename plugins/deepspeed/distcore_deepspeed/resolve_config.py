"""Derive DeepSpeed's config from a run: its batches, precision, rates, clipping and the
size of its model.
"""

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
    """Return DeepSpeed's config with every "auto" filled in. Raises ConfigError,
    one line, for contradictions.

    ``model`` is the whole model, for its hidden size. Without ``training``, keys that only training
    reads are left out.
    """
    config, user = run.config, user if training else user.for_evaluation()
    tree = fill(
        user,
        [
            *derived_settings(user, config, run.world.size),
            *scheduler_settings(config, user, run.total_steps),
            *_bucket_settings(model),
            *_adam_settings(user, config, run.world.is_main),
        ],
    )
    if not training:
        return {key: value for key, value in tree.items() if key not in ("optimizer", "scheduler")}
    if tree.get("scheduler", {}).get("params", {}).get("warmup_num_steps", 1) < 1:
        raise ConfigError(
            "schedule.warmup_steps = 0: DeepSpeed's warm-up schedulers need at least 1; set it"
        )
    if user.stage == 0:
        # at stage 0 the strategy clips, so that it can report the norm
        tree["gradient_clipping"] = 0.0
    return tree


def resolve_section(user: UserConfig, config: RunConfig, ranks: int, model: nn.Module) -> Tree:
    """Return DeepSpeed's section ``zero_optimization`` with every "auto" filled in, before
    the steps are known.
    """
    settings = [*derived_settings(user, config, ranks), *_bucket_settings(model)]
    # The optimizer's and the scheduler's sections may have an "auto" that only a run can fill in.
    section: Tree = fill(user.for_evaluation(), settings)[ZERO]
    return section


def derived_settings(user: UserConfig, config: RunConfig, ranks: int) -> list[Setting]:
    """Return the settings that follow from distcore's config and the user's
    options, without a model.
    """
    if config.micro_batch_size == "auto":
        # With micro-batches by tokens, their number differs from step to step: DeepSpeed
        # sees a single one.
        micro, rows = (
            max(1, config.global_batch_size // ranks),
            "micro_batch_size (auto: global_batch_size / ranks)",
        )
    else:
        micro, rows = config.micro_batch_size, "micro_batch_size"
    norm, source = config.clip.norm, "global_batch_size / (micro_batch_size * ranks)"
    return [
        Setting("train_batch_size", config.global_batch_size, "global_batch_size"),
        Setting("train_micro_batch_size_per_gpu", micro, rows),
        Setting(
            "gradient_accumulation_steps",
            max(1, config.global_batch_size // (micro * ranks)),
            source,
        ),
        # always, because DeepSpeed's default clips at 1.0
        Setting("gradient_clipping", norm or 0.0, "clip.norm"),
        *(
            Setting(f"{name}.enabled", config.precision == name, "precision")
            for name in ("bf16", "fp16")
        ),
        Setting(
            "torch_autocast.enabled", False, "precision (DeepSpeed's own bf16 or fp16)", "match"
        ),
        # A user who asks for the sum of all ranks' means is refused: the loss is scaled so that
        # both are the mean.
        Setting("gradient_allreduce_op", "mean", "the strategy's mean over ranks", "match"),
        Setting("gradient_allreduce_op", user.gradients, "", "default"),
        Setting("managed_gradient_accumulation", True, "the loop's accumulation", "match"),
        Setting("data_efficiency.enabled", False, "the sampler of distcore", "match"),
        Setting("hybrid_engine.enabled", False, "the training of distcore", "match"),
        Setting("autotuning.enabled", False, "the training of distcore", "match"),
        *(
            Setting(key, 1, "the strategy's data parallel ranks (mesh splits layers)", "match")
            for key in SPLITS
        ),
        # it waits for the device
        Setting("timers.throughput.enabled", False, "the progress line", "default"),
        *user.options,
        Setting(f"{ZERO}.stage", user.stage, "", "default"),
        *_memory_settings(user, config),
        *_own_optimizer(config, user),
        *optimizer_settings(config, user),
    ]


def _memory_settings(user: UserConfig, config: RunConfig) -> list[Setting]:
    settings = []
    if user.stage == 3:  # DeepSpeed's own default replicates all of a small model
        settings.append(Setting(PERSISTENCE, AUTO, "the hidden size", "default"))
    if config.precision == "bf16":
        settings.append(Setting("data_types.grad_accum_dtype", "fp32", "precision", "default"))
    return settings


def _own_optimizer(config: RunConfig, user: UserConfig) -> list[Setting]:
    """Return the settings with which DeepSpeed accepts any optimizer of
    distcore, offloaded or not.
    """
    if optimizer_type(config, user) is not None:
        return []
    source = "optimizer.name (built by distcore)"
    is_tested = config.optimizer.name in ("adam", "adamw")
    settings = [] if is_tested else [Setting("zero_allow_untested_optimizer", True, source)]
    if user.offload("offload_optimizer") != "none":
        settings.append(Setting("zero_force_ds_cpu_optimizer", False, source))
    return settings


def _bucket_settings(model: nn.Module) -> list[Setting]:
    hidden = _hidden_size(model)
    if hidden is None:  # without a hidden size, keep DeepSpeed's own defaults
        fields = DeepSpeedZeroConfig.model_fields.values()
        defaults = {field.alias: field.default for field in fields} | {
            "reduce_bucket_size": int(5e8)
        }
        return [
            Setting(path, int(defaults[path.partition(".")[2]]), "", "auto")
            for path in BY_HIDDEN_SIZE
        ]
    sizes = {f"{ZERO}.{name}": int(factor * hidden * hidden) for name, factor in BUCKETS.items()}
    sizes[PERSISTENCE] = 10 * hidden
    return [
        Setting(path, value, "the model's hidden size", "auto") for path, value in sizes.items()
    ]


def _hidden_size(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    sizes = getattr(config, "hidden_sizes", None)
    size = getattr(config, "hidden_size", None) or (max(sizes) if sizes else None)
    return int(size) if size else None


def _adam_settings(user: UserConfig, config: RunConfig, logs: bool) -> list[Setting]:
    if optimizer_type(config, user) not in ("Adam", "AdamW"):
        return []
    uses_torch = ops.uses_torch_adam(config.device, user.offload("offload_optimizer"), logs)
    return [Setting("optimizer.params.torch_adam", uses_torch, "", "default")]

"""DeepSpeed's optimizers and schedulers: their names, their settings, and checks that
they can work here.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

from distcore import ConfigError, RunConfig, nearest
from distcore_deepspeed import ops
from distcore_deepspeed.json_config import AUTO, Setting, UserConfig, get
from distcore_deepspeed.library import lr_schedules

OPTIMIZERS = {
    "deepspeed-adam": "Adam",
    "deepspeed-adamw": "AdamW",
    "deepspeed-lamb": "Lamb",
    "deepspeed-onebitadam": "OneBitAdam",
}
"""Map ``optimizer.name`` to the type in DeepSpeed's config. distcore
builds all other optimizers.
"""
ONE_BIT = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
"""Types that DeepSpeed dropped and old configs still name."""
PEAK_OF = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
}
"""Map a scheduler to its parameter that replaces the optimizer's learning rate."""
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest")
OF_CONFIG = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "torch_adam",
    "fp32_optimizer_states",
    "foreach",
    "fused",
)
"""Parameters of an optimizer that distcore's config has, or that change no result."""
AS_IN_ADAMW = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}
"""Parameters of DeepSpeed's Adam with the values of AdamW, as distcore builds it; its
AdamW ignores the first.
"""
LATER = ("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps")
"""Keys that need the number of steps of the run, which is known after the data is read."""


def optimizer_type(config: RunConfig, user: UserConfig) -> str | None:
    """Return the type of DeepSpeed's optimizer that the run uses; ``None``: distcore's own."""
    return user.get("optimizer.type") or OPTIMIZERS.get(config.optimizer.name)


def optimizer_settings(config: RunConfig, user: UserConfig) -> list[Setting]:
    """Return the settings of DeepSpeed's optimizer from distcore's config; none
    for distcore's own optimizer.
    """
    if optimizer_type(config, user) is None:
        return []
    peak = get(user.tree, f"scheduler.params.{PEAK_OF.get(str(user.scheduler))}")
    # the scheduler sets the rate, whatever the optimizer's is
    is_replaced = isinstance(peak, int | float)
    settings = [
        Setting("optimizer.params.lr", config.lr, "lr", "default" if is_replaced else "must")
    ]
    for name, value in config.optimizer.options.items():  # those of adamw
        settings.append(Setting(f"optimizer.params.{name}", value, f"optimizer.{name}"))
    if config.optimizer.name in OPTIMIZERS:
        settings.append(
            Setting("optimizer.type", OPTIMIZERS[config.optimizer.name], "optimizer.name")
        )
    return settings


def own_values(user: UserConfig) -> dict[str, Any]:
    """Return what DeepSpeed trains with in place of distcore's schedule and AdamW, by
    key of distcore's config.

    "auto" and what is left out come from distcore's config, which a resume compares by itself.
    """
    values: dict[str, Any] = {}
    if user.scheduler is not None:
        values["schedule"] = {"type": user.scheduler} | _given(get(user.tree, "scheduler.params"))
    kind = user.get("optimizer.type")
    special = {}
    for key, value in _given(get(user.tree, "optimizer.params")).items():
        # Without effect: AdamW is Adam in that mode.
        is_mode_of_adamw = (kind, key) == ("AdamW", "adam_w_mode")
        if key not in OF_CONFIG and AS_IN_ADAMW.get(key) != value and not is_mode_of_adamw:
            special[key] = value
    if special or kind == "Lamb":
        values["optimizer"] = ({"type": kind} if kind else {}) | special
    return values


def _given(params: Any) -> dict[str, Any]:
    """Return the arguments that the user's JSON gives a value, neither null nor "auto"."""
    values = {}
    for key, value in (params or {}).items():
        if value is not None and value != AUTO:
            values[key] = value
    return values


def scheduler_settings(
    config: RunConfig, user: UserConfig, total_steps: int | None
) -> list[Setting]:
    """Return the settings of DeepSpeed's scheduler from distcore's config.

    ``total_steps`` is ``None`` before the data is read.
    """
    if user.scheduler is None:
        return []
    takes = inspect.signature(getattr(lr_schedules, user.scheduler)).parameters
    rates = {
        "warmup_min_lr": (0.0, "default"),
        "warmup_max_lr": (config.lr, "must"),
        "cycle_max_lr": (config.lr, "must"),
    }
    rates |= {"cycle_min_lr": (0.0, "default"), "lr_range_test_min_lr": (config.lr, "auto")}
    settings = [
        _parameter(name, value, "lr", kind)
        for name, (value, kind) in rates.items()
        if name in takes
    ]
    if total_steps is not None:
        warmup, source = config.schedule.warmup_steps, "schedule.warmup_steps"
        steps = [
            _parameter("warmup_num_steps", warmup, source, "must"),
            _parameter("total_num_steps", total_steps, "the steps of the run", "default"),
        ]
        settings += [setting for setting in steps if setting.path.rpartition(".")[2] in takes]
    return settings


def _parameter(name: str, value: Any, source: str, kind: Any) -> Setting:
    """Return the setting of an argument of the scheduler."""
    return Setting(f"scheduler.params.{name}", value, source, kind)


def check_optimizer(config: RunConfig, user: UserConfig) -> None:
    """Raise ConfigError, one line with the reason, unless DeepSpeed's optimizer can work here."""
    kinds = list(OPTIMIZERS.values())
    kind = optimizer_type(config, user)
    device = config.device
    if kind is None:
        return
    if config.optimizer.name not in ("adamw", *OPTIMIZERS):
        raise ConfigError(
            f"optimizer.name = {config.optimizer.name!r}, but DeepSpeed's config asks for its own"
            f" {kind}; leave the section optimizer out of it, or the name"
        )
    if kind in ONE_BIT:
        reason = f"DeepSpeed dropped its 1-bit optimizers in 0.19.7; here is {version('deepspeed')}"
        raise ConfigError(f"optimizer {kind}: {reason}; use deepspeed-adamw or adamw")
    if kind not in kinds and str(kind).lower() in ("sgd", "lion"):
        raise ConfigError(
            f"optimizer.type = {kind!r} in DeepSpeed's config: not supported; leave the section"
            f" out, and let distcore build it: --optimizer {str(kind).lower()}"
        )
    if kind not in kinds:
        hint = nearest(kind, kinds)
        raise ConfigError(
            f"optimizer.type = {kind!r} in DeepSpeed's config: not supported{hint}"
            f" ({', '.join(kinds)})"
        )
    if kind == "Lamb" and device == "cpu":
        raise ConfigError(
            "optimizer Lamb: DeepSpeed's is a CUDA kernel, and there is no GPU; use deepspeed-adamw"
        )
    if kind == "Lamb" and not ops.can_load(ops.lamb()):
        raise ConfigError(
            "optimizer Lamb: its kernel must be compiled, with a C++ compiler, ninja and nvcc;"
            " install them"
        )


def check_scheduler(user: UserConfig) -> None:
    """Raise ConfigError, one line, for a scheduler that DeepSpeed lacks."""
    kind = user.scheduler
    if kind is not None and kind not in SCHEDULERS:
        schedulers = ", ".join(SCHEDULERS)
        if kind == "WarmupCosineLR":
            raise ConfigError(
                f"DeepSpeed scheduler {kind!r}: not supported; leave it out, and set"
                " schedule.name=cosine"
            )
        raise ConfigError(
            f"DeepSpeed scheduler {kind!r}: not supported{nearest(kind, SCHEDULERS)} ({schedulers})"
        )


def check_rates(user: UserConfig, config: RunConfig) -> None:
    """Raise ConfigError, one line, for learning rates of single groups, which
    DeepSpeed's scheduler would replace.
    """
    key = "optimizer.layer_decay" if config.optimizer.layer_decay is not None else None
    for index, group in enumerate(config.optimizer.groups):
        key = f"optimizer.groups.{index}" if group.lr or group.lr_scale else key
    if user.scheduler is not None and key:
        raise ConfigError(
            f"{key}: DeepSpeed's scheduler {user.scheduler} gives all parameters one rate; use"
            " schedule.name instead"
        )


def check_schedule(user: UserConfig, config: RunConfig) -> None:
    """Raise ConfigError, one line, for DeepSpeed's optimizer with a schedule of distcore
    that is not constant.
    """
    optimizer = optimizer_type(config, user)
    if user.scheduler is None and optimizer is not None and config.schedule.name != "constant":
        raise ConfigError(
            f"schedule.name = {config.schedule.name!r} with DeepSpeed's optimizer {optimizer}: not"
            " supported; use optimizer.name=adamw, schedule.name=constant, or"
            " strategy_options.scheduler=WarmupDecayLR"
        )

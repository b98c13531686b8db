"""The optimizer and the learning-rate schedule of a config."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from distcore import registry
from distcore.config import RunConfig
from distcore.errors import ConfigError, TaskError
from distcore.hints import how_to_get, nearest, samples_of
from distcore.model.optimizers.adam import AdamW
from distcore.model.optimizers.own import as_plugin
from distcore.model.optimizers.vector_ends import step_ends_in_vectors
from distcore.model.parameter_groups import NO_PHASES, parameter_groups
from distcore.model.run_schedule import factor_of, lambda_scheduler, warmup_steps
from distcore.model.running_statistics import keep_frozen_statistics
from distcore.model.schedules import POLYNOMIAL_END, check_schedule_name
from distcore.plugin.optimizer import BuildsOptimizer
from distcore.plugin.options import build, options_of, values_of
from distcore.plugin.strategy.contract import OptimizerFactory
from distcore.plugin.task.phases import Phase


def optimizer_factory(
    config: RunConfig, phases: Mapping[str, Phase] = NO_PHASES
) -> OptimizerFactory:
    """Return a function that builds the configured optimizer for a module, for ``wrap_model``."""
    return partial(_built, config, phases)


def _built(
    config: RunConfig, phases: Mapping[str, Phase], module: nn.Module
) -> torch.optim.Optimizer:
    """Build the optimizer; raises TaskError for a phase's setting that it does not have."""
    optimizer = load_optimizer(config)
    groups = parameter_groups(config, module, getattr(optimizer, "weight_decay", None), phases)
    keys = {key for group in groups for key in group}
    own_settings = sorted(keys - {"params", "lr", "weight_decay"})
    built = optimizer.build(module, groups)
    options = options_of(type(optimizer))
    possible = [option.name for option in options if option.name in built.defaults]
    for setting in own_settings:
        if setting not in possible:
            raise TaskError(
                f"task: phases(): the optimizer {config.optimizer.name!r} has no setting"
                f" {setting!r} for each group of parameters{nearest(setting, possible)} (it has lr,"
                f" lr_scale, {', '.join(possible)})"
            )
    # Only then: it costs a few calls for each tensor in every step.
    if config.exact is not None and built.defaults.get("fused"):
        step_ends_in_vectors(built)
    return built


def check_optimizer(
    config: RunConfig, meta_model: nn.Module, phases: Mapping[str, Phase] = NO_PHASES
) -> None:
    """Raise ConfigError if groups, phases, layer decay or the optimizer do not fit the model.

    An optimizer of a file may compute with the parameters, which have no values here: a rank builds
    it.
    """
    optimizer = load_optimizer(config)
    if ".py:" in config.optimizer.name:
        parameter_groups(config, meta_model, getattr(optimizer, "weight_decay", None), phases)
    else:
        with contextlib.suppress(RuntimeError):  # torch's, for a value that is asked for
            _built(config, phases, meta_model)


def load_optimizer(config: RunConfig) -> BuildsOptimizer:
    """Build the plugin of the configured optimizer from its options; raises DistcoreError.

    A strategy's own optimizer, which has no entry point, has the options of adamw.
    """
    name = config.optimizer.name
    values = config.optimizer.options
    cls = optimizer_class(name) if is_plugin(name) else AdamW
    options = [option.name for option in options_of(cls)]
    for key in values:
        if key in options:
            continue
        keys = type(config.optimizer).model_fields
        if key == "lr":
            hint = " (the learning rate is --lr)"
        else:
            hint = "" if key in keys else nearest(key, [*options, *keys])
        listed = ", ".join(options) or "no options"
        raise ConfigError(f"unknown key 'optimizer.{key}'{hint}: {name} has {listed}")
    return build("optimizer", name, cls, values)


def optimizer_options(config: RunConfig) -> dict[str, Any]:
    """Return all options of the optimizer by name, as JSON values; raises DistcoreError."""
    return values_of(load_optimizer(config))


def optimizer_class(name: str) -> type[BuildsOptimizer]:
    """Import an optimizer, by its entry point or as ``file.py:Class``; raises DistcoreError."""
    return as_plugin(name, registry.load("optimizers", name))


def is_plugin(name: str) -> bool:
    """Return True for ``file.py:Class``, an entry point, and one that only has to be installed.

    Any other name can only be a strategy's own optimizer.
    """
    if ".py:" in name or name in registry.offers("optimizers"):
        return True
    return how_to_get("optimizers", name) is not None


def check_freeze(config: RunConfig) -> None:
    """Raise ConfigError if ``freeze`` is no regular expression."""
    try:
        re.compile(config.freeze or "")
    except re.error as error:
        raise ConfigError(
            f"freeze = {config.freeze!r}: not a regular expression: {error}"
        ) from None


def freeze(config: RunConfig, module: nn.Module) -> None:
    """Freeze parameters with ``freeze`` in their names, and statistics where nothing is trained.

    With LoRA only the adapter's parameters count: the others are frozen already, and statistics go
    on, since what it trains follows them. Raises ConfigError if the pattern matches no parameter,
    or all.
    """
    if config.freeze is not None:
        _freeze_parameters(config, config.freeze, module)
    keep_frozen_statistics(module, goes_on_in_frozen_parts=config.lora.rank is not None)


def _freeze_parameters(config: RunConfig, pattern: str, module: nn.Module) -> None:
    """Freeze the parameters whose names have the pattern; raises ConfigError for none, and all."""
    has_adapter = config.lora.rank is not None
    names = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad or not has_adapter
    ]
    frozen = {name for name in names if re.search(pattern, name)}
    if len(frozen) in (0, len(names)):
        extent = f"matches {'every' if frozen else 'no'} parameter's name"
        if has_adapter:
            extent += " that LoRA trains"
        samples = ", ".join(samples_of(names))
        raise ConfigError(f"freeze = {pattern!r}: {extent}; names are such as {samples}")
    for name, parameter in module.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def scheduler_for(
    config: RunConfig, optimizer: torch.optim.Optimizer, total_steps: int, epoch: int = 1
) -> LRScheduler | None:
    """Return the schedule, to be stepped once per optimizer step; ``None`` for a constant rate.

    ``epoch`` is the number of steps of an epoch.
    """
    if config.schedule.name == "constant":
        return None
    assert not isinstance(config.lr, str)  # 'auto' was resolved before any rank started
    factor = factor_of(config, total_steps, steps_per_epoch=epoch)
    interval = epoch if config.schedule.interval == "epoch" else 1
    return lambda_scheduler(factor, optimizer, warmup_steps(config, total_steps), interval)


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each parameter group; an optimizer may keep it as a tensor."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def logged_rate(optimizer: torch.optim.Optimizer, peak: float) -> float:
    """Return the learning rate to log: of the first group at the run's ``peak``, if any.

    Else that of the first group. Groups without parameters do not count: an optimizer may make such
    ones, at a rate at which nothing is trained.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    # An engine that keeps the parameters elsewhere may leave all groups empty.
    groups = groups or optimizer.param_groups
    at_peak = [group for group in groups if group.get("initial_lr", group["lr"]) == peak]
    first = (at_peak or groups)[0]
    return float(first["lr"])


def check_schedule(config: RunConfig) -> None:
    """Raise DistcoreError for an unknown schedule, or one that does not fit its warm-up or rate."""
    name, warmup = config.schedule.name, config.schedule.warmup_steps
    check_schedule_name(name)
    has_warmup = bool(config.schedule.warmup_ratio if warmup == "auto" else warmup)
    if name == "constant" and has_warmup:
        raise ConfigError("schedule.name = 'constant': has no warm-up; use constant_with_warmup")
    if config.schedule.interval == "epoch" and has_warmup:
        raise ConfigError(
            "schedule.interval = 'epoch': not with a warm-up, whose first step, and so epoch, has"
            " rate 0"
        )
    if name == "polynomial" and isinstance(config.lr, float) and config.lr <= POLYNOMIAL_END:
        raise ConfigError(
            f"lr = {config.lr}: the schedule 'polynomial' ends at {POLYNOMIAL_END}; use a"
            " larger one"
        )

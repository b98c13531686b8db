"""The optimizer and the learning-rate schedule of a config."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from distcore.config import RunConfig
from distcore.distributed.devices import FUSED
from distcore.errors import ConfigError, nearest
from distcore.plugin.contract import OptimizerFactory

WARMUP_STABLE_DECAY = "warmup_stable_decay"
"""The schedule that holds its peak until the last part of the run, ``schedule.decay_ratio``."""


def optimizer_factory(config: RunConfig) -> OptimizerFactory:
    """Return a function that builds the configured optimizer for a module; ``wrap_model`` gets it."""
    return partial(_adamw, config)


def _adamw(config: RunConfig, module: nn.Module) -> torch.optim.Optimizer:
    assert not isinstance(config.lr, str)  # 'auto' was resolved before any rank started
    return torch.optim.AdamW(
        parameter_groups(module, config.optimizer.weight_decay),
        lr=config.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        fused=_can_fuse(module),
    )


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split the trainable parameters into groups with weight decay and, for biases and normalization weights, without.

    It goes by names and module classes, not by shapes, which a sharding strategy may have changed.
    """
    exempt = set(_exempt(module))
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (plain if name in exempt else decayed).append(parameter)
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _exempt(module: nn.Module) -> Iterator[str]:
    for path, child in module.named_modules():
        is_norm = "norm" in type(child).__name__.lower()
        for name, _ in child.named_parameters(recurse=False):
            if is_norm or name.endswith("bias"):
                yield f"{path}.{name}" if path else name


def _can_fuse(module: nn.Module) -> bool:
    """Return True if torch's fused AdamW takes the parameters: all floating-point, and on one type of device."""
    kinds = {(p.device.type, p.is_floating_point()) for p in module.parameters()}
    return len(kinds) == 1 and kinds <= {(kind, True) for kind in FUSED}


def check_freeze(config: RunConfig) -> None:
    """Raise ConfigError if ``freeze`` is no regular expression."""
    try:
        re.compile(config.freeze or "")
    except re.error as error:
        raise ConfigError(f"freeze = {config.freeze!r}: not a regular expression: {error}") from None


def freeze(config: RunConfig, module: nn.Module) -> None:
    """Exclude the parameters from training in whose names ``freeze`` is found; raises ConfigError for none, or all."""
    if config.freeze is None:
        return
    names = [name for name, _ in module.named_parameters()]
    frozen = {name for name in names if re.search(config.freeze, name)}
    if len(frozen) in (0, len(names)):
        found = "is found in no parameter's name" if not frozen else "is found in every parameter's name"
        some = ", ".join(names[:: max(1, len(names) // 5)][:5])
        raise ConfigError(f"freeze = {config.freeze!r}: {found}; names are such as {some}")
    for name, parameter in module.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def warmup_steps(config: RunConfig, total_steps: int) -> int:
    """Return the number of warm-up steps: as configured, or ``warmup_ratio`` of ``total_steps``."""
    given = config.schedule.warmup_steps
    return given if isinstance(given, int) else round(config.schedule.warmup_ratio * total_steps)


def with_warmup(config: RunConfig, total_steps: int) -> RunConfig:
    """Return ``config`` with the warm-up steps filled in, the only 'auto' that needs the size of the data."""
    schedule = config.schedule.model_copy(update={"warmup_steps": warmup_steps(config, total_steps)})
    return config.model_copy(update={"schedule": schedule})


def scheduler_for(config: RunConfig, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler | None:
    """Return the schedule, to be stepped once per optimizer step; ``None`` for a constant learning rate."""
    if config.schedule.name == "constant":
        return None
    from transformers.optimization import get_scheduler  # slow to import

    warmup, more = warmup_steps(config, total_steps), {}
    if config.schedule.name == WARMUP_STABLE_DECAY:
        more = {"num_decay_steps": min(round(config.schedule.decay_ratio * total_steps), total_steps - warmup)}
    scheduler: LRScheduler = get_scheduler(
        config.schedule.name, optimizer, warmup, total_steps, scheduler_specific_kwargs=more
    )
    return scheduler


def check_schedule(config: RunConfig) -> None:
    """Raise ConfigError unless transformers has a schedule of this name that needs no arguments of its own."""
    from transformers.trainer_utils import SchedulerType

    takes_more = ("plateau", "min_lr", "greedy")
    known = sorted(kind.value for kind in SchedulerType if not any(word in kind.value for word in takes_more))
    if config.schedule.name not in known:
        hint = nearest(config.schedule.name, known)
        names = ", ".join(known)
        raise ConfigError(f"schedule.name = {config.schedule.name!r}: no such schedule{hint} (known: {names})")

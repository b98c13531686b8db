"""Refuse settings before any rank starts that DeepSpeed would refuse late, ignore, or get wrong."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version

from distcore import ConfigError, RunConfig
from distcore_deepspeed import library, ops
from distcore_deepspeed.config_keys import ignored_keys, refusals, unknown_keys
from distcore_deepspeed.json_config import ZERO, Tree, UserConfig, fill
from distcore_deepspeed.optimizers import (
    LATER,
    check_optimizer,
    check_rates,
    check_scheduler,
    optimizer_type,
    scheduler_settings,
)
from distcore_deepspeed.resolve_config import BY_HIDDEN_SIZE, derived_settings
from distcore_deepspeed.unsupported import unsupported

log = logging.getLogger("distcore")


def check_training(user: UserConfig, config: RunConfig) -> None:
    """Raise ConfigError, one line, for settings of a training run that DeepSpeed cannot do."""
    if config.precision != "fp32" and user.stage == 0:
        raise ConfigError(
            f"{ZERO}.stage = 0 with precision = {config.precision!r}: DeepSpeed's optimizer is one"
            " step ahead there and the result is wrong; use stage=1, which is as fast"
        )
    check_optimizer(config, user)
    _check_adam(user, optimizer_type(config, user))
    check_scheduler(user)
    check_rates(user, config)
    _check_json(user, config)


def check_evaluation(user: UserConfig, config: RunConfig) -> None:
    """Raise ConfigError, one line, for settings of an evaluation that DeepSpeed cannot do.

    An evaluation has no optimizer, and batches of any size.
    """
    _check_json(user.for_evaluation(), config)


def _check_adam(user: UserConfig, kind: str | None) -> None:
    """Refuse DeepSpeed's own Adam if the user demands it and it cannot be compiled."""
    is_demanded = user.get("optimizer.params.torch_adam") is False
    builder = ops.adam(user.offload("offload_optimizer"))
    if is_demanded and kind in ("Adam", "AdamW") and not ops.can_load(builder):
        raise ConfigError(
            f"optimizer.params.torch_adam = false: DeepSpeed's {builder.name} cannot be compiled"
            " here (no C++ compiler or ninja); install them, or leave torch_adam out"
        )


def _check_json(user: UserConfig, config: RunConfig) -> None:
    """Raise ConfigError, one line, for DeepSpeed's JSON: first as written, then as filled in."""
    _check_fp16(config)
    if "sparse_attention" in user.tree:
        reason = f"DeepSpeed dropped it in 0.19.7; here is {version('deepspeed')}"
        raise ConfigError(
            f"{user.source}: sparse_attention: {reason}; take it out, and the model's own attention"
            " is used"
        )
    written = _with_optimizer_type(user, config)
    with_stage = {ZERO: {"stage": user.stage}} | user.tree
    if reasons := unsupported(with_stage, config):
        raise ConfigError(f"{user.source}: {'; '.join(reasons)}")
    unknown = unknown_keys(written, config.device, user.offload("offload_optimizer"))
    # DeepSpeed's own refusal of a misspelled key would not name the key that was meant.
    _refuse(user, unknown or refusals(user.tree))
    ranks = config.nproc if isinstance(config.nproc, int) else 1
    settings = [*derived_settings(user, config, ranks), *scheduler_settings(config, user, None)]
    tree = fill(user, settings, later=(*LATER, *BY_HIDDEN_SIZE))
    _check_offload(tree[ZERO])
    _refuse(user, refusals(tree))
    ignored = list(ignored_keys(written))
    if ignored and _is_first():
        log.warning("%s: DeepSpeed ignores %s", user.source, ", ".join(ignored))
    library.import_before_fork()


def _check_fp16(config: RunConfig) -> None:
    """Refuse fp16 on a CPU whose DeepSpeed has none."""
    if config.precision != "fp16" or config.device != "cpu" or library.fp16_on_cpu():
        return
    has_file = not config.strategy_options.keys().isdisjoint(("config", "config_file"))
    # A file that says fp16 would contradict the other precision.
    remedy_in_file = ", and take fp16 out of the strategy's file" if has_file else ""
    raise ConfigError(
        "precision = 'fp16': DeepSpeed has no fp16 on a CPU; use --precision bf16 or"
        f" fp32{remedy_in_file}"
    )


def _refuse(user: UserConfig, reasons: list[str]) -> None:
    """Raise ConfigError, one line, if there are ``reasons``."""
    if reasons:
        raise ConfigError(
            f"{user.source}: DeepSpeed {version('deepspeed')} refuses it: {'; '.join(reasons)}"
        )


def _is_first() -> bool:
    """Return True where settings are checked first, so that a warning appears once.

    That is the process that starts the ranks, or rank 0 of another launcher.
    """
    return os.environ.get("RANK", "0") == "0" and "DISTCORE_LAUNCHER" not in os.environ


def _with_optimizer_type(user: UserConfig, config: RunConfig) -> Tree:
    """Return the JSON with the type of the optimizer, which distcore's config may name."""
    section = user.tree.get("optimizer")
    if not section:
        return user.tree
    return user.tree | {"optimizer": section | {"type": optimizer_type(config, user)}}


def _check_offload(section: Tree) -> None:
    """Refuse offload that DeepSpeed would silently ignore, or that lacks a folder or a library."""
    stage = section["stage"]
    for name in ("offload_optimizer", "offload_param"):
        offload = section.get(name) or {}
        device = offload.get("device", "none")
        if device == "nvme" and not offload.get("nvme_path"):
            raise ConfigError(
                f"{ZERO}.{name}.device = 'nvme': needs nvme_path, a folder on a fast disk"
            )
        # Only partitioned parameters can leave the device; nvme needs stage 3's swapper.
        lowest_stage = 3 if name == "offload_param" or device == "nvme" else 1
        if device != "none" and stage < lowest_stage:
            raise ConfigError(
                f"{ZERO}.{name}.device = {device!r}: DeepSpeed ignores it at stage {stage}; use"
                f" stage={lowest_stage}"
            )
        if device == "nvme" and (lacking := ops.missing_for_nvme()):
            raise ConfigError(
                f"{ZERO}.{name}.device = 'nvme': DeepSpeed's async_io needs {lacking}; install it"
            )

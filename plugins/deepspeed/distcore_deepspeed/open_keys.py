"""Values of distcore's keys from a DeepSpeed JSON, for keys that the user leaves open."""

from __future__ import annotations

from typing import Any

from distcore import ConfigError, RunConfig
from distcore_deepspeed.json_config import AUTO, UserConfig, get
from distcore_deepspeed.optimizers import PEAK_OF

RATE, DECAY, TORCH_DECAY = 1e-3, 0.0, 0.01
"""DeepSpeed's defaults for its optimizers, and torch's weight decay for ``torch_adam``."""
WARMUP = 1000
"""Steps of DeepSpeed's warm-up where the JSON names none."""
LEAST_WARMUP = 1
"""The fewest steps that DeepSpeed's warm-up takes, for "auto" where nobody asks for a warm-up."""


def open_values(user: UserConfig, config: RunConfig, owns_schedule: bool = True) -> dict[str, Any]:
    """Return the values of distcore's keys in the user's JSON, by dotted key; none without one.

    Keys that the JSON omits have DeepSpeed's defaults: no weight decay, and a constant rate if
    ``owns_schedule`` says that only the JSON can name a scheduler. ``config`` is known as far as
    ``fill_config`` has it.
    """
    if not user.is_given:
        return {}
    values = _batch(user, config) | _optimizer(user) | _schedule(user, config, owns_schedule)
    norm = _number(user, "gradient_clipping")
    if norm is not None:
        values["clip.norm"] = norm or None
    for name in ("bf16", "fp16"):
        if get(user.tree, f"{name}.enabled") in (True, 1):
            values["precision"] = name
    return values


def _batch(user: UserConfig, config: RunConfig) -> dict[str, Any]:
    """Return the batch sizes, where DeepSpeed derives one of its three from the two others."""
    if config.nproc == "auto":
        return {}
    whole = _number(user, "train_batch_size")
    micro = _number(user, "train_micro_batch_size_per_gpu")
    accumulation = _number(user, "gradient_accumulation_steps")
    ranks = config.nproc
    values: dict[str, Any] = {}
    if micro is not None:
        values["micro_batch_size"] = micro
        whole = whole or micro * (accumulation or 1) * ranks
    if whole is not None:
        values["global_batch_size"] = whole
    if micro is None and accumulation not in (None, 1):
        rows = whole or config.global_batch_size
        micro_batches = ranks * accumulation
        if rows % micro_batches == 0:
            values["micro_batch_size"] = rows // micro_batches
    return values


def _optimizer(user: UserConfig) -> dict[str, Any]:
    """Return rate, weight decay, betas and eps; raises ConfigError for one that is no number."""
    if not get(user.tree, "optimizer.type"):
        return {}
    params = get(user.tree, "optimizer.params") or {}
    # What DeepSpeed's own optimizer takes where the JSON says nothing.
    default_decay = TORCH_DECAY if params.get("torch_adam") is True else DECAY
    values = {
        "lr": params.get("lr", RATE),
        "optimizer.weight_decay": params.get("weight_decay", default_decay),
    }
    for name in ("betas", "eps"):
        values[f"optimizer.{name}"] = params.get(name)
    values = {key: value for key, value in values.items() if value not in (None, AUTO)}
    for key, value in values.items():
        numbers = value if isinstance(value, list) and key == "optimizer.betas" else [value]
        if not all(isinstance(number, int | float) for number in numbers):
            name = key.rpartition(".")[2]
            raise ConfigError(
                f"{user.source}: optimizer.params.{name} = {value!r}: expected a number"
            )
    return values


def _schedule(user: UserConfig, config: RunConfig, owns_schedule: bool) -> dict[str, Any]:
    """Return the peak rate and the warm-up of the JSON's scheduler, or a constant rate."""
    if user.scheduler is None:
        if owns_schedule and get(user.tree, "optimizer.type"):
            return {"schedule.name": "constant"}
        return {}
    values: dict[str, Any] = {}
    peak = _number(user, f"scheduler.params.{PEAK_OF.get(user.scheduler)}")
    if peak is not None:
        values["lr"] = peak
    has_warmup = config.schedule.name != "constant" and not config.schedule.warmup_ratio
    if user.scheduler.startswith("Warmup") and has_warmup:
        steps = user.get("scheduler.params.warmup_num_steps")
        if steps is None:
            steps = WARMUP
        elif steps == AUTO:
            steps = LEAST_WARMUP
        values["schedule.warmup_steps"] = steps
    return values


def _number(user: UserConfig, path: str) -> Any:
    """Return the value of a key; ``None`` for "auto", which distcore's config fills in."""
    value = get(user.tree, path)
    return None if value == AUTO else value

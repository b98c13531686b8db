"""The config of a job without settings, to find the differences of a resolved config."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from distcore.config import EXECUTION, RunConfig, with_changes
from distcore.distributed.devices import resolve_device
from distcore.errors import DistcoreError
from distcore.plugin.options import values_of
from distcore.resolve import tasks
from distcore.resolve.resolve import resolve

CHOSEN = ("task", "task_options", "strategy", "strategy_options", "micro_batch_size", "device")
"""Keys by which 'auto' of other keys is decided."""
BY_MACHINE = ("nproc", "micro_batch_tokens")
"""Keys of how a run is computed that do not depend on its data."""


def usual(config: RunConfig) -> dict[str, Any]:
    """Return as JSON values what the keys of a resolved ``config`` are where a user sets none of them.

    Each 'auto' has its value for this job. The row form, which depends on the data, is that of ``config``. The task
    differs always.
    """
    given = RunConfig()
    plain: dict[str, Any] = given.model_dump(mode="json")
    named = {"optimizer.name": config.optimizer.name, "lora.rank": config.lora.rank}
    values = plain
    with suppress(DistcoreError):  # a plugin or a device of the run is not here: more keys differ then
        chosen = {key: getattr(config, key) for key in CHOSEN}
        values = resolve(with_changes(given, chosen | named), elsewhere=True).config.model_dump(mode="json")
        values["device"] = resolve_device(given, elsewhere=True)
    values |= {key: getattr(config, key) for key in EXECUTION - {*CHOSEN, *BY_MACHINE}}
    values |= {"task": None, "task_options": {}, **{key: plain[key] for key in CHOSEN[2:5]}}
    values["optimizer"]["name"], values["lora"]["rank"] = given.optimizer.name, given.lora.rank
    values["schedule"]["warmup_steps"] = "auto" if config.schedule.warmup_ratio else 0
    with suppress(DistcoreError, TypeError):  # a task that needs an option
        values["task_options"] = values_of(tasks.of(with_changes(config, {"task_options": {}})).task)
    return values


def differing(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of ``tree`` that differ from those of ``other``."""
    kept = {}
    for key, value in tree.items():
        beside = other.get(key)
        if isinstance(value, dict) and isinstance(beside, dict):
            value, beside = differing(value, beside), {}
        if value != beside:
            kept[key] = value
    return kept

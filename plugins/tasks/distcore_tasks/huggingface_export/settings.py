"""The settings of a run that differ from the defaults, for a reader who trains it again."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

import yaml

from distcore import DistcoreError, RunConfig, dump_config
from distcore.distributed import resolve_device
from distcore.lab import EXECUTION, resolve

CHOSEN = ("task", "task_options", "strategy", "strategy_options", "micro_batch_size", "device")
"""Keys by which 'auto' of other keys is decided."""
BY_MACHINE = ("nproc", "micro_batch_tokens")
"""Keys of how a run is computed that do not depend on its data."""


def shareable_settings(config: RunConfig) -> dict[str, Any]:
    """Return the keys of a resolved ``config`` that differ from the defaults.

    Absolute paths are cut to their last part.
    """
    # The hook sees the object of every level.
    text = json.dumps(config.model_dump(mode="json"))
    shared = RunConfig.model_validate(json.loads(text, object_hook=_without_folders))
    settings = yaml.safe_load(dump_config(shared, defaults=False))
    return _differing(settings, _usual(config))


def without_folder(value: str) -> str:
    """Return a name, or an absolute path's last part: folders are nobody's business."""
    return os.path.basename(value) if os.path.isabs(value) else value


def _without_folders(tree: dict[str, Any]) -> dict[str, Any]:
    """Return an object of JSON with ``without_folder`` of its keys and texts."""
    cut = {}
    for key, value in tree.items():
        cut[without_folder(key)] = without_folder(value) if isinstance(value, str) else value
    return cut


def _usual(config: RunConfig) -> dict[str, Any]:
    """Return the values, as JSON, that the keys of ``config`` have if a user sets none of them.

    Each 'auto' has its value for this job. The row form depends on the data, so it is taken from
    ``config``. The task differs always.
    """
    defaults = RunConfig()
    plain: dict[str, Any] = defaults.model_dump(mode="json")
    values = plain
    # A plugin or a device of the run may be missing on this machine: more keys differ then.
    with suppress(DistcoreError):
        resolved = resolve(_deciding_keys(config), elsewhere=True).config
        values = resolved.model_dump(mode="json")
        values["device"] = resolve_device(defaults, elsewhere=True)
    for key in EXECUTION - {*CHOSEN, *BY_MACHINE}:
        values[key] = getattr(config, key)
    for key in ("strategy", "strategy_options", "micro_batch_size"):
        values[key] = plain[key]
    values["optimizer"]["name"] = defaults.optimizer.name
    values["lora"]["rank"] = defaults.lora.rank
    values["schedule"]["warmup_steps"] = "auto" if config.schedule.warmup_ratio else 0
    values["task"] = None
    values["task_options"] = {}
    with suppress(DistcoreError, TypeError):  # a task that needs an option
        values["task_options"] = _task_defaults(config)
    return values


def _deciding_keys(config: RunConfig) -> RunConfig:
    """Return a config with only the keys of ``config`` that decide the value of an 'auto'."""
    keys: dict[str, Any] = {key: getattr(config, key) for key in CHOSEN}
    keys["optimizer"] = {"name": config.optimizer.name}
    keys["lora"] = {"rank": config.lora.rank}
    return RunConfig(**keys)


def _task_defaults(config: RunConfig) -> dict[str, Any]:
    """Return the options of the task of ``config`` where a user sets none.

    Raises DistcoreError if it needs one.
    """
    only_task = RunConfig(task=config.task, lr=config.lr, device="cpu")
    return dict(resolve(only_task, training=False).config.task_options)


def _differing(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of ``tree`` that differ from those of ``other``."""
    differing: dict[str, Any] = {}
    for key, value in tree.items():
        other_value = other.get(key)
        if isinstance(value, dict) and isinstance(other_value, dict):
            value, other_value = _differing(value, other_value), {}
        if value != other_value:
            differing[key] = value
    return differing

"""The settings of a run that differ from those of a job without settings, for a reader
who trains it again.
"""

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
    """Return the keys of a resolved ``config`` that differ from the defaults; of absolute
    paths, the last part.
    """
    shared = json.loads(json.dumps(config.model_dump(mode="json")), object_hook=_without_folders)
    known = yaml.safe_load(dump_config(RunConfig.model_validate(shared), defaults=False))
    return _differing(known, _usual(config))


def without_folder(value: str) -> str:
    """Return a name, or an absolute path's last part: folders are nobody's business."""
    return os.path.basename(value) if os.path.isabs(value) else value


def _without_folders(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        without_folder(key): without_folder(value) if isinstance(value, str) else value
        for key, value in tree.items()
    }


def _usual(config: RunConfig) -> dict[str, Any]:
    """Return the values, as JSON, that the keys of a resolved ``config`` have if a user
    sets none of them.

    Each 'auto' has its value for this job. The row form depends on the data, so it is taken from
    ``config``. The task differs always.
    """
    given = RunConfig()
    plain: dict[str, Any] = given.model_dump(mode="json")
    values = plain
    # a plugin or a device of the run is not here: more keys differ then
    with suppress(DistcoreError):
        values = resolve(_of_one_kind(config), elsewhere=True).config.model_dump(mode="json")
        values["device"] = resolve_device(given, elsewhere=True)
    values |= {key: getattr(config, key) for key in EXECUTION - {*CHOSEN, *BY_MACHINE}}
    values |= {"task": None, "task_options": {}, **{key: plain[key] for key in CHOSEN[2:5]}}
    values["optimizer"]["name"], values["lora"]["rank"] = given.optimizer.name, given.lora.rank
    values["schedule"]["warmup_steps"] = "auto" if config.schedule.warmup_ratio else 0
    with suppress(DistcoreError, TypeError):  # a task that needs an option
        values["task_options"] = _task_defaults(config)
    return values


def _of_one_kind(config: RunConfig) -> RunConfig:
    """Return a config with only the keys of ``config`` that decide the value of an 'auto'."""
    named: dict[str, Any] = {
        "optimizer": {"name": config.optimizer.name},
        "lora": {"rank": config.lora.rank},
    }
    return RunConfig(**{key: getattr(config, key) for key in CHOSEN}, **named)


def _task_defaults(config: RunConfig) -> dict[str, Any]:
    """Return the options of the task of ``config`` where a user sets none; raises DistcoreError
    if it needs one.
    """
    only_task = RunConfig(task=config.task, lr=config.lr, device="cpu")
    return dict(resolve(only_task, training=False).config.task_options)


def _differing(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of ``tree`` that differ from those of ``other``."""
    kept = {}
    for key, value in tree.items():
        beside = other.get(key)
        if isinstance(value, dict) and isinstance(beside, dict):
            value, beside = _differing(value, beside), {}
        if value != beside:
            kept[key] = value
    return kept

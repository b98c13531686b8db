"""A config with other values: the one place that copies a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from distcore.config.schema import RunConfig


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return ``config`` with ``changes``, values by dotted key such as ``schedule.warmup_steps``.

    Values are taken as they are: whoever decides them has checked them.
    """
    own = {key: value for key, value in changes.items() if "." not in key}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, dot, rest = key.partition(".")
        if dot:
            inner.setdefault(group, {})[rest] = value
    groups = {group: _tree(config, group).model_copy(update=values) for group, values in inner.items()}
    return config.model_copy(update=own | groups)


def is_open(config: RunConfig, dotted: str) -> bool:
    """Return True if no one has set the key: it has its default, or is "auto"."""
    group, _, key = dotted.rpartition(".")
    tree = _tree(config, group) if group else config
    return key not in tree.model_fields_set or getattr(tree, key) == "auto"


def _tree(config: RunConfig, group: str) -> BaseModel:
    tree: BaseModel = getattr(config, group)
    return tree

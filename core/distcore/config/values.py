"""Values of a config as text, and a config as a flat list of keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from distcore.errors import ConfigError


def parse_settings(given: Iterable[str]) -> dict[str, Any]:
    """Read the values of ``--set KEY=VALUE``, by dotted key."""
    changes = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: expected KEY=VALUE, such as --set optimizer.weight_decay=0.1")
        changes[key] = parse_value(value)
    return changes


def parse_value(text: str) -> Any:
    """Read the value of ``--set key=value`` as YAML does, and ``1e-4`` as a number."""
    try:
        return _number_if(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def parse_values(text: str) -> list[Any]:
    """Read values separated by commas, each as ``parse_value`` does; a comma in brackets separates none."""
    try:
        found = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        found = text.split(",")
    return [_number_if(value) for value in found]


def _number_if(value: Any) -> Any:
    """Return a text that is a number as one: YAML 1.1 takes 1e-4 for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted key: ``{"clip": {"norm": 1.0}}`` gives ``{"clip.norm": 1.0}``."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return leaves

"""Values to start from, by the name of ``--preset``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {"fast": {"loader": {"length_grouping": "auto"}, "precision": "auto"}}
"""Values by the name of ``--preset``; what the user sets goes before them."""


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was ``given`` for a config, and under it the values of its preset, if it names one."""
    return _under(given, PRESETS.get(str(given.get("preset")), {}))


def _under(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with what it leaves open filled in."""
    found = dict(given)
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(found.get(key, {}), dict):
            found[key] = _under(found.get(key, {}), value)
        else:
            found.setdefault(key, value)
    return found

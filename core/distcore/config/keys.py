"""Keys in groups: former names, presets, keys of execution alone, and keys that reset others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distcore.deprecation import deprecated

RENAMED = {"packing": "padding_free"}
"""Map each old key to its new name, both at the top of a config. All are deprecated since 0.2."""
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"loader": {"length_grouping": "auto"}, "precision": "auto"}
}
"""Values by the name of ``--preset``; the user's own settings override them."""
EXECUTION = frozenset(
    {
        "strategy",
        "strategy_options",
        "nproc",
        "micro_batch_size",
        "micro_batch_tokens",
        "padding_free",
    }
)
"""Keys of execution: devices, micro-batches and padding. They do not change the
mathematics of a step.
"""
FOLLOWING: Sequence[tuple[frozenset[str], Mapping[str, Any]]] = (
    (frozenset({"strategy"}), {"strategy_options": {}}),
    (frozenset({"epochs"}), {"max_steps": None}),
    (frozenset({"strategy", "nproc", "device", "compile"}), {"padding_free": "auto"}),
    (
        frozenset({"strategy", "nproc"}),
        {"micro_batch_size": "auto", "loader.forward_tokens": "auto"},
    ),
    (frozenset({"micro_batch_size"}), {"micro_batch_tokens": None}),
)
"""Keys, each with the values of a written config that it invalidates if it
changes, by dotted key.
"""


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with the keys of today; a key that is there under both names keeps
    the value of today's.
    """
    for old in tree.keys() & RENAMED:
        deprecated(f"config key {old!r}", "0.2", repr(RENAMED[old]))
    renamed = {RENAMED[key]: value for key, value in tree.items() if key in RENAMED}
    return renamed | {key: value for key, value in tree.items() if key not in RENAMED}


def reset_by(changed: Iterable[str]) -> dict[str, Any]:
    """Return the values of a written config that the ``changed`` keys invalidate, by dotted key."""
    names = set(changed)
    reset = dict[str, Any]()
    for keys, values in FOLLOWING:
        reset |= values if keys & names else {}
    return reset


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given``, completed by the values of its preset, if it names one."""
    return _under(given, PRESETS.get(str(given.get("preset")), {}))


def _under(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with those of ``values`` that it lacks, at any depth."""
    merged = dict(given)
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(merged.get(key, {}), dict):
            merged[key] = _under(merged.get(key, {}), value)
        else:
            merged.setdefault(key, value)
    return merged

"""Keys that have another name today: configs and command lines that use the old one mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {"packing": "padding_free"}
"""The key of today by that of before, both at the top of a config."""


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with the keys of today; a key that is there under both names keeps the value of today's."""
    renamed = {RENAMED[key]: value for key, value in tree.items() if key in RENAMED}
    return renamed | {key: value for key, value in tree.items() if key not in RENAMED}

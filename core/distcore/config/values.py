"""Values of a config as text, and a config as a flat list of keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from distcore.errors import ConfigError

DEEPEST, LARGEST = 50, 100_000
"""Limits on levels and values of a config. A YAML file with references to itself
can exceed any size.
"""


def parse_settings(given: Iterable[str]) -> dict[str, Any]:
    """Read the values of ``--set KEY=VALUE``, by dotted key."""
    changes = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {text}: expected KEY=VALUE, such as --set optimizer.weight_decay=0.1"
            )
        changes[key] = parse_value(value)
    return changes


def parse_value(text: str) -> Any:
    """Read the value of ``--set key=value`` as YAML does, and ``1e-4`` as a number."""
    try:
        return _number_if(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def parse_values(text: str) -> list[Any]:
    """Read comma-separated values, each as ``parse_value`` does; commas in
    brackets do not separate.
    """
    try:
        values = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        values = text.split(",")
    return [_number_if(value) for value in values]


def in_words(value: object, annotation: object) -> object:
    """Return ``value``; of a boolean the word ``on`` or ``off`` where ``annotation`` has these
    words, and no bool.

    YAML reads the words without quotes as booleans. Raises ValueError for a boolean
    where neither is expected.
    """
    expected = str(annotation)
    is_bool_expected = any(name in expected for name in ("bool", "Any", "object"))
    if not isinstance(value, bool) or is_bool_expected:
        return value
    word = "on" if value else "off"
    if repr(word) in expected:
        return word
    raise ValueError(
        "expected neither true nor false (yes, no, on and off without quotes are those, too)"
    )


def _number_if(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def check_tree(tree: object, source: str) -> None:
    """Raise ConfigError for a tree that cannot be written down again: too deep, too large, or
    not of valid text.
    """
    left = LARGEST
    waiting = [(tree, 0)]
    while waiting:
        (value, depth), left = waiting.pop(), left - 1
        if depth > DEEPEST or not left:
            raise ConfigError(
                f"{source}: has more than {DEEPEST} levels or {LARGEST} values; take some out"
            )
        if isinstance(value, Mapping):
            waiting.extend((inner, depth + 1) for pair in value.items() for inner in pair)
        elif isinstance(value, list | tuple | set):
            waiting.extend((inner, depth + 1) for inner in value)
        elif isinstance(value, int) and value.bit_length() > 64:
            raise ConfigError(
                f"{source}: has a whole number of {value.bit_length()} bits; expected at most 64"
            )
        elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ConfigError(
                f"{source}: {ascii(value)[:60]} is not valid text: it has half of a surrogate pair"
            )


def flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted key: ``{"clip": {"norm":
    1.0}}`` gives ``{"clip.norm": 1.0}``.
    """
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= (
            flatten(value, f"{above}{key}.")
            if isinstance(value, Mapping)
            else {f"{above}{key}": value}
        )
    return leaves

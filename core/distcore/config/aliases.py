"""Short keys: those at the top of a config that stand for an option of its task."""

from __future__ import annotations

from typing import Any

from distcore.errors import ConfigError

DEFAULT_TASK = "text-classification"
"""The task of a config that names none."""
TASK_ALIASES = (
    "model", "data", "eval_data", "test_data", "eval_fraction", "columns", "tokenizer", "max_seq_len", "dropout",
)  # fmt: skip
"""Keys at the top of a config that are short for the option of the task of the same name."""


def canonical(dotted: str) -> str:
    """Return the full key that ``dotted`` is short for: ``columns.text`` gives ``task_options.columns.text``."""
    return f"task_options.{dotted}" if dotted.partition(".")[0] in TASK_ALIASES else dotted


def with_task_options(tree: dict[str, Any], source: str = "config") -> dict[str, Any]:
    """Return ``tree`` with the keys of ``TASK_ALIASES`` moved into ``task_options``.

    Raises ConfigError, which names ``source``, if a key stands in both places.
    """
    short = {key: tree[key] for key in TASK_ALIASES if key in tree}
    options = tree.get("task_options") or {}
    if isinstance(options, dict) and "packing" in options:  # an option of causal-lm in earlier versions
        options = {key: value for key, value in options.items() if key != "packing"}
        tree = {"packing": tree["task_options"]["packing"]} | tree | {"task_options": options}
    if not short or not isinstance(options, dict):
        return tree
    if len(short) == len(TASK_ALIASES) and tree.get("task", DEFAULT_TASK) != DEFAULT_TASK and not options:
        short = {}  # a run of an earlier version: it recorded all these keys whether its task used them or not
    if twice := sorted(short.keys() & options.keys()):
        raise ConfigError(f"{source}: {twice[0]!r} is short for 'task_options.{twice[0]}', which is set too; keep one")
    rest = {key: value for key, value in tree.items() if key not in TASK_ALIASES}
    return rest | {"task_options": short | options}

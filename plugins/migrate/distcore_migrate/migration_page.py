"""The config as YAML: each key with its origin, and comments on the keys that have
no place in it.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from distcore import RunConfig
from distcore_migrate.draft import Draft, Kind, Note, Tree

WIDTH = 110
HEADINGS: dict[Kind, str] = {
    "open": "Said by no source:",
    "none": "Has no equal here:",
    "instead": "Is asked for in another way here:",
    "differs": "Means something else here:",
    "start": "Flags of the command that starts it, below:",
    "idle": "Without effect here:",
}
"""Headings of the kinds of notes, in their order on the page."""


def page(draft: Draft, sources: list[str]) -> str:
    """Return the text of the config file."""
    lines = [*_comment(f"Written by distcore migrate, from: {', '.join(sources)}")]
    for kind, heading in HEADINGS.items():
        notes = [note for note in draft.notes if note.kind == kind]
        if notes:
            lines += ["#", *_comment(heading)]
            for note in notes:
                lines += _note(note)
    # Once each: an argument's default may ask for nothing, too.
    idle_keys = list(dict.fromkeys(draft.about("off")))
    if idle_keys:
        lines += ["#", *_comment(f"Asks for nothing: {', '.join(idle_keys)}")]
    if draft.start:
        start = f"distcore train THIS_FILE {shlex.join(draft.start)}"
        lines += ["#", *_comment(f"Start it by: {start}")]
    lines += _tree(nested(draft), draft)
    return "\n".join(lines) + "\n"


def _note(note: Note) -> list[str]:
    return _comment(f"- {note.about}: {note.text}", "#   ")


def _comment(text: str, later: str = "# ") -> list[str]:
    clean = " ".join(text.split())
    return textwrap.wrap(
        clean,
        WIDTH,
        initial_indent="# ",
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def nested(draft: Draft) -> Tree:
    """Return the config as a tree: first the task, then the keys in the order of RunConfig."""
    order = ["task", "task_options", *RunConfig.model_fields]

    def position(dotted: str) -> int:
        section, _, _ = dotted.partition(".")
        return order.index(section)

    tree: Tree = {}
    for dotted in sorted(draft.values, key=position):
        *parents, leaf = dotted.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = draft.values[dotted]
    return tree


def _tree(tree: Tree, draft: Draft, prefix: str = "", indent: str = "") -> Iterator[str]:
    """Yield the lines of a branch as YAML, each value with the key that it was read from."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value and dotted not in draft.opaque:
            yield f"{indent}{key}:"
            yield from _tree(value, draft, f"{dotted}.", f"{indent}  ")
        else:
            yield f"{indent}{key}: {_scalar(value)}  # {' '.join(draft.origins[dotted].split())}"


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")

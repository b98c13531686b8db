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
        if notes := [note for note in draft.notes if note.kind == kind]:
            lines += ["#", *_comment(heading)]
            lines += [line for note in notes for line in _note(note)]
    if off := list(dict.fromkeys(note.about for note in draft.notes if note.kind == "off")):
        lines += ["#", *_comment(f"Asks for nothing: {', '.join(off)}")]
    if draft.start:
        lines += [
            "#",
            *_comment(f"Start it by: distcore train THIS_FILE {shlex.join(draft.start)}"),
        ]
    return "\n".join([*lines, *_tree(nested(draft), draft)]) + "\n"


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
    """Return the config as a tree, its keys in the order of a reader: the task,
    then as RunConfig has them.
    """
    order = ["task", "task_options", *RunConfig.model_fields]
    tree: Tree = {}
    for dotted, value in sorted(
        draft.values.items(), key=lambda item: order.index(item[0].partition(".")[0])
    ):
        *parents, leaf = dotted.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = value
    return tree


def _tree(tree: Tree, draft: Draft, prefix: str = "", indent: str = "") -> Iterator[str]:
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

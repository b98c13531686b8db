"""Files of whole jobs, in the words of libraries above the Trainer: arguments, and what they train."""

from __future__ import annotations

from distcore_migrate import axolotl, lightning, llama_factory
from distcore_migrate.draft import Tree
from distcore_migrate.scripts import SCRIPTS, Script

LIBRARIES = {"LLaMA-Factory": llama_factory.script_of, "Axolotl": axolotl.script_of, "Lightning": lightning.script_of}
"""Formats of whole jobs, with what a file of theirs trains."""


def read_job(tree: Tree, kind: str) -> tuple[Tree, Script | None]:
    """Return the arguments in a file of TrainingArguments or of a library above it, and what that trains."""
    if kind == "TRL":
        return tree, SCRIPTS["dpo" if "beta" in tree else "sft"]
    script = LIBRARIES[kind](tree) if kind in LIBRARIES else None
    return (lightning.arguments_of(tree) if kind == "Lightning" else tree), script

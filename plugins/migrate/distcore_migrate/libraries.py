"""Files of whole jobs, for libraries above the Trainer: their arguments, and the script
that they stand for.
"""

from __future__ import annotations

from pathlib import Path

from distcore_migrate import axolotl, lightning, llama_factory
from distcore_migrate.draft import Tree
from distcore_migrate.scripts import SCRIPTS, Script

LIBRARIES = {
    "LLaMA-Factory": llama_factory.script_of,
    "Axolotl": axolotl.script_of,
    "Lightning": lightning.script_of,
}
"""Map each format of whole jobs to the function that returns the script of a file."""


def read_job(tree: Tree, kind: str, file: str = "") -> tuple[Tree, Script | None]:
    """Return arguments and script of a file, from TrainingArguments or from a library above them.

    ``file``: its name.
    """
    if kind == "TRL":
        return (
            tree,
            SCRIPTS[
                (
                    "reward"
                    if "center_rewards_coefficient" in tree
                    else "dpo"
                    if "beta" in tree
                    else "sft"
                )
            ],
        )
    if kind == "LLaMA-Factory":
        return tree, llama_factory.script_of(tree, Path(file).parent if file else None)
    script = LIBRARIES[kind](tree) if kind in LIBRARIES else None
    return (lightning.arguments_of(tree) if kind == "Lightning" else tree), script

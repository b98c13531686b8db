"""Which checkpoints stay, and how the others go."""

from __future__ import annotations

from pathlib import Path

from distcore.checkpoint.commit import REMOVING
from distcore.checkpoint.files import Files


def prune(folder: Path, keep: set[str], files: Files | None = None) -> None:
    """Remove the checkpoints whose names are not in ``keep``, each renamed first so that it is never half there."""
    files = files or Files()
    for path in sorted(folder.glob("step-*")):
        if path.name not in keep:
            gone = folder / f"{REMOVING}{path.name}"
            files.rename(path, gone)
            files.remove(gone)

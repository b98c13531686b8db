"""Which checkpoints stay, and how the others go."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from distcore.checkpoint.commit import REMOVING
from distcore.checkpoint.files import Files
from distcore.checkpoint.manifest import read_manifest
from distcore.errors import CheckpointError

log = logging.getLogger("distcore")


def checkpoints_in(folder: Path) -> list[Path]:
    """The committed checkpoints of a folder, the newest first; committed is not undamaged."""
    return sorted(folder.glob("step-*"), key=lambda path: (len(path.name), path.name), reverse=True)


def whole_ones(folder: Path) -> Iterator[Path]:
    """Those whose manifest is right and whose files are there in full size, the newest first."""
    for path in checkpoints_in(folder):
        if problem := problem_of(path):
            log.warning("passed over: %s", problem)
        else:
            yield path


def problem_of(path: Path) -> str | None:
    """What is wrong with a checkpoint that can be seen without reading its tensors."""
    try:
        read_manifest(path)
    except CheckpointError as error:
        return str(error)
    return None


def leave_branch(folder: Path, continued: Path, files: Files) -> None:
    """Remove the checkpoints that are newer than the one a run continues from: they belong to a course it has left."""
    if continued.resolve().parent == folder.resolve():
        every = checkpoints_in(folder)
        for path in every[: next(index for index, path in enumerate(every) if path.name == continued.name)]:
            _remove(path, files)


def retain(folder: Path, keep_last: int, best: int | None, files: Files | None = None) -> None:
    """Keep the newest ``keep_last`` checkpoints and that of step ``best``; remove the others.

    Each is renamed first, so that none is ever half there. Nothing goes unless one that stays is whole.
    """
    every = checkpoints_in(folder)
    stay = [path for path in every if path in every[:keep_last] or path.name == f"step-{best or 0:08d}"]
    if all(problem_of(path) for path in stay):
        return
    files = files or Files()
    for path in every:
        if path not in stay:
            _remove(path, files)


def _remove(path: Path, files: Files) -> None:
    gone = path.with_name(f"{REMOVING}{path.name}")
    files.rename(path, gone)
    files.remove(gone)

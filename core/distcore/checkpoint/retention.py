"""Retention: choose the checkpoints to keep, and remove the others."""

from __future__ import annotations

import logging
from pathlib import Path

from distcore.checkpoint.commit import REMOVING
from distcore.checkpoint.files import Files
from distcore.checkpoint.manifest import read_manifest
from distcore.errors import CheckpointError

log = logging.getLogger("distcore")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the committed checkpoints of a folder, the newest first.

    They may have been damaged since.
    """

    # Names have at least eight digits, so those of later steps may be longer: compare the lengths
    # first.
    def by_step(path: Path) -> tuple[int, str]:
        return len(path.name), path.name

    return sorted(folder.glob("step-*"), key=by_step, reverse=True)


def newest_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint with a valid manifest whose files exist in full size.

    ``None`` if there are no checkpoints. Raises CheckpointError if all are damaged.
    """
    problems: list[str] = []
    for path in checkpoints_in(folder):
        if not (problem := problem_of(path)):
            for line in problems:
                log.warning("skipped: %s", line)
            return path
        problems.append(problem)
    if problems:
        advice = f"{problems[0]}; resume from a copy, or train anew into another --out"
        raise CheckpointError(
            f"{folder.parent}: none of {len(problems)} checkpoints is whole: {advice}"
        )
    return None


def problem_of(path: Path) -> str | None:
    """Return a checkpoint's defect, by manifest and file sizes alone; ``None`` if it has none."""
    try:
        read_manifest(path)
    except CheckpointError as error:
        return str(error)
    return None


def remove_newer(folder: Path, continued: Path, files: Files) -> None:
    """Remove the checkpoints newer than ``continued``: the resumed run will write them again."""
    if continued.resolve().parent != folder.resolve():
        return
    every = checkpoints_in(folder)
    names = [path.name for path in every]
    for path in every[: names.index(continued.name)]:
        _remove(path, files)


def retain(folder: Path, keep_last: int, best: int | None, files: Files | None = None) -> None:
    """Keep the newest ``keep_last`` checkpoints and that of step ``best``; remove the others.

    Removes nothing if all checkpoints to keep are damaged.
    """
    every = checkpoints_in(folder)
    best_name = f"step-{best or 0:08d}"
    to_keep = [path for path in every if path in every[:keep_last] or path.name == best_name]
    if all(problem_of(path) for path in to_keep):
        return
    files = files or Files()
    for path in every:
        if path not in to_keep:
            _remove(path, files)


def _remove(path: Path, files: Files) -> None:
    # Renamed first: a folder that is only half removed must not look like a checkpoint.
    removing = path.with_name(f"{REMOVING}{path.name}")
    files.rename(path, removing)
    files.remove(removing)

"""Checkpoints without strategy and world size, committed whole or not at all; docs/checkpoint-format.md.

``step-NNNNNNNN/`` holds safetensors files that the ranks wrote in parallel, ``state.json``, and a manifest with the
size and SHA-256 of every file. Reading one runs no pickle.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from distcore.checkpoint.commit import aside_of, begin, clean_up, commit, hand_in, together
from distcore.checkpoint.files import Files
from distcore.checkpoint.manifest import FORMAT, MANIFEST, read_manifest
from distcore.checkpoint.progress import check_job, job_of, restore, small_state
from distcore.checkpoint.reader import Checkpoint
from distcore.checkpoint.retention import prune
from distcore.checkpoint.writer import FILE_BYTES, PARTS, blocks_of, write_share
from distcore.contract import Progress, Run
from distcore.errors import CheckpointError
from distcore.hooks import Hooks

__all__ = [
    "FILE_BYTES", "FORMAT", "PARTS", "Checkpoint", "Files", "Tensors", "clean_up", "find", "job_of", "load", "prune",
    "read_small_state", "read_tensors", "save",
]  # fmt: skip


def save(
    run: Run,
    hooks: Hooks,
    progress: Progress,
    folder: Path,
    facts: dict[str, Any],
    files: Files | None = None,
    limit: int = FILE_BYTES,
) -> Path:
    """Commit ``folder/step-NNNNNNNN``, whole or not at all; every rank calls and returns the path.

    ``facts`` are JSON values that stand beside the progress. Raises CheckpointError on all ranks if it fails on any:
    a full disk, or pieces that do not make whole tensors.
    """
    files = files or Files()
    final = folder / f"step-{progress.step:08d}"
    rank, size = run.world.rank, run.world.size
    blocks = blocks_of(hooks.save_checkpoint(run), rank, size, limit)
    small = small_state(run, progress) | facts
    what = f"checkpoint {final} could not be written"

    def write() -> None:
        hand_in(files, final, rank, write_share(files, aside_of(final), blocks, rank, limit))

    together(run, hooks, what, partial(begin, files, final) if run.world.is_main else _nothing)
    together(run, hooks, what, write)
    together(run, hooks, what, partial(commit, files, final, size, small) if run.world.is_main else _nothing)
    return final


def find(resume: str, out: Path) -> Path | None:
    """Return the checkpoint that ``--resume`` means; ``None`` if ``auto`` finds none, so that a run starts afresh.

    ``auto``: the newest whose manifest is right and whose files are there in full size.
    """
    if resume != "auto":
        path = Path(resume)
        if not (path / MANIFEST).is_file():
            raise CheckpointError(f"resume = {resume!r}: no checkpoint there (a folder step-NNNNNNNN with {MANIFEST})")
        return path
    return next(filter(_is_whole, sorted((out / "checkpoints").glob("step-*"), reverse=True)), None)


def load(run: Run, hooks: Hooks, path: Path) -> tuple[Progress, dict[str, Any]]:
    """Put the checkpoint at ``path`` into the run; return its progress and the small state beside it.

    Ranks share out the files and hash each once before anything is loaded. Raises CheckpointError on all ranks: for
    a damaged file, with its name, or another job, with the difference.
    """
    checkpoint = Checkpoint(path)
    together(run, hooks, f"{path}: damaged", partial(checkpoint.verify, run.world.rank, run.world.size))
    small = checkpoint.small_state()
    check_job(run, small, path)
    hooks.load_checkpoint(run, checkpoint)
    return restore(run, small, path), small


def read_small_state(path: Path) -> dict[str, Any]:
    """Read ``state.json`` of a checkpoint; raises CheckpointError where it is damaged or of another format."""
    return Checkpoint(path).small_state()


class Tensors(dict[str, Tensor]):
    """A state that is in memory as a whole; implements ``distcore.SavedState``."""

    def piece(self, name: str, start: int, count: int) -> Tensor:
        return self[name].reshape(-1)[start : start + count]


def read_tensors(path: Path, parts: tuple[str, ...] = PARTS) -> Tensors:
    """Read every tensor of these parts into memory."""
    checkpoint = Checkpoint(path)
    return Tensors({name: checkpoint[name] for name in checkpoint if name.partition("/")[0] in parts})


def _is_whole(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def _nothing() -> None:
    """What ranks other than the main one do while it works."""

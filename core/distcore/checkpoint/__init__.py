"""Checkpoints without strategy and world size, committed whole or not at all; docs/checkpoint-format.md.

``step-NNNNNNNN/`` holds safetensors files that the ranks wrote in parallel, ``state.json``, and a manifest with the
size and SHA-256 of every file. Reading one runs no pickle.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from distcore.checkpoint.commit import begin, clean_up, commit, discard, publish_share, staging_of
from distcore.checkpoint.files import Files
from distcore.checkpoint.job_state import check_job, progress_in, restore, small_state
from distcore.checkpoint.manifest import FORMAT, MANIFEST
from distcore.checkpoint.reader import Checkpoint
from distcore.checkpoint.retention import checkpoints_in, leave_branch, problem_of, retain, whole_ones
from distcore.checkpoint.writer import FILE_BYTES, PARTS, blocks_of, write_share
from distcore.distributed.agreement import from_main, on_all_ranks
from distcore.errors import CheckpointError, DamagedError
from distcore.plugin.contract import Progress, Run, World
from distcore.plugin.hooks import Hooks

log = logging.getLogger("distcore")
__all__ = [
    "FORMAT", "MANIFEST", "PARTS", "Checkpoint", "DamagedError", "Files", "Tensors", "find", "load", "load_weights",
    "read_small_state", "read_tensors", "resume", "retain", "save",
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
        publish_share(files, final, rank, write_share(files, staging_of(final), blocks, rank, limit))

    try:
        on_all_ranks(run, hooks, what, partial(begin, files, final) if run.world.is_main else _nothing)
        on_all_ranks(run, hooks, what, write)
        on_all_ranks(run, hooks, what, partial(commit, files, final, size, small) if run.world.is_main else _nothing)
    except CheckpointError:
        if run.world.is_main:
            discard(files, final)
        raise
    return final


def find(resume: str, out: Path) -> Path | None:
    """Return the checkpoint that ``--resume`` means; ``None`` if ``auto`` finds none, so that a run starts afresh.

    ``auto``: the newest whose manifest is right and whose files are there in full size. Raises CheckpointError where
    there are some and none is whole.
    """
    folder = out / "checkpoints"
    if resume != "auto":
        path = Path(resume)
        if not (path / MANIFEST).is_file():
            raise CheckpointError(f"resume = {resume!r}: no checkpoint there (a folder step-NNNNNNNN with {MANIFEST})")
        return path
    found = next(whole_ones(folder), None)
    if found is None and (every := checkpoints_in(folder)):
        raise CheckpointError(f"resume = 'auto': none of {len(every)} checkpoints is whole: {problem_of(every[0])}")
    return found


def resume(run: Run, hooks: Hooks, data: str | None = None) -> tuple[Path, Progress, dict[str, Any]] | None:
    """Go on as ``run.config.resume`` says; ``None``: the run starts afresh. Every rank calls.

    Clears what a killed writer left. ``auto`` goes back to an earlier checkpoint where the newest turns out to be
    damaged; a path does not. ``data``: see ``load``.
    """
    out, asked = Path(str(run.config.out)), run.config.resume
    if run.world.is_main:
        clean_up(Files(), out / "checkpoints")
    found = on_all_ranks(run, hooks, "resume", lambda: find(asked, out) if asked and run.world.is_main else None)
    path = from_main(run, hooks, str(found or ""))
    if not path:
        return None
    newest = Path(path)
    earlier = [other for other in checkpoints_in(newest.parent) if other < newest] if asked == "auto" else []
    while True:
        try:
            progress, small = load(run, hooks, newest, data)
            break
        except DamagedError as error:
            if not earlier:
                raise
            log.warning("passed over: %s", error)
            newest = earlier.pop(0)
    tidy = partial(leave_branch, out / "checkpoints", newest, Files())
    on_all_ranks(run, hooks, "resume", tidy if run.world.is_main else _nothing)
    return newest, progress, small


def load(run: Run, hooks: Hooks, path: Path, data: str | None = None) -> tuple[Progress, dict[str, Any]]:
    """Put the checkpoint at ``path`` into the run; return its progress and the small state beside it.

    Ranks share out the files and hash each once before anything is loaded. Raises CheckpointError on all ranks: for
    a damaged file, with its name (DamagedError), or another job, with the difference. ``data`` identifies the rows
    that the run trains on; it is compared where both sides know it.
    """
    checkpoint = on_all_ranks(run, hooks, f"{path}: damaged", partial(_verified, path, run.world))
    small = checkpoint.small_state()
    check_job(run, small, path, data)
    progress = progress_in(small, path)
    hooks.load_checkpoint(run, checkpoint, progress)
    restore(run, small, progress, path)
    return progress, small


def load_weights(run: Run, hooks: Hooks, path: Path) -> None:
    """Put only the weights of the checkpoint at ``path`` into a run that does not train."""
    checkpoint = on_all_ranks(run, hooks, f"{path}: damaged", partial(_verified, path, run.world))
    hooks.load_checkpoint(run, checkpoint, progress_in(checkpoint.small_state(), path))


def _verified(path: Path, world: World) -> Checkpoint:
    checkpoint = Checkpoint(path)
    checkpoint.verify(world.rank, world.size)
    return checkpoint


def read_small_state(path: Path) -> dict[str, Any]:
    """Read ``state.json`` of a checkpoint; raises CheckpointError where it is damaged or of another format."""
    return Checkpoint(path).small_state()


class Tensors(dict[str, Tensor]):
    """A state that is in memory as a whole; implements ``distcore.SavedState``."""

    def piece(self, name: str, start: int, count: int) -> Tensor:
        return self[name].reshape(-1)[start : start + count]

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        return self[name][tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]


def read_tensors(path: Path, parts: tuple[str, ...] = PARTS) -> Tensors:
    """Read every tensor of these parts into memory."""
    checkpoint = Checkpoint(path)
    return Tensors({name: checkpoint[name] for name in checkpoint if name.partition("/")[0] in parts})


def _nothing() -> None:
    """What ranks other than the main one do while it works."""

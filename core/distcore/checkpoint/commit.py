"""Commit: a checkpoint is written aside, is on the disk to the last byte, and then appears by one rename."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from distcore.checkpoint.files import Files
from distcore.checkpoint.manifest import (
    CHECKSUM,
    FORMAT,
    MANIFEST,
    STATE,
    Share,
    checksum_line,
    joined,
    parse,
    read_json,
)
from distcore.checkpoint.tensors import write_hashed
from distcore.contract import Run
from distcore.errors import CheckpointError
from distcore.hooks import Hooks

T = TypeVar("T")
ASIDE, REPLACED, REMOVING = ".writing-", ".replaced-", ".removing-"
"""What folders are called that are not, or no longer, checkpoints."""


def begin(files: Files, final: Path) -> None:
    """Make the folder aside, empty; on the main rank, before any rank writes."""
    aside = aside_of(final)
    if aside.exists():
        files.remove(aside)
    files.make_folder(aside)


def aside_of(final: Path) -> Path:
    """Where ``final`` is written until it is whole."""
    return final.with_name(ASIDE + final.name)


def hand_in(files: Files, final: Path, rank: int, share: Share) -> None:
    """Tell the main rank, by a file aside, what this rank wrote."""
    draft, done = _share_files(final, rank)
    files.write(draft, iter([share.model_dump_json().encode()]))
    files.rename(draft, done)


def handed_in(final: Path, rank: int) -> bool:
    """Whether ``rank`` has written its share."""
    return _share_files(final, rank)[1].exists()


def commit(files: Files, final: Path, size: int, small: dict[str, Any]) -> None:
    """Join what ``size`` ranks wrote and make it the checkpoint ``final``; on the main rank, after all have written.

    Raises CheckpointError if their pieces do not make whole tensors.
    """
    aside = aside_of(final)
    shares = [_take(files, final, rank) for rank in range(size)]
    entries = {name: entry for share in shares for name, entry in share.files.items()}
    entries[STATE] = write_hashed(files, aside / STATE, _json(small))
    text = Share(files=entries, tensors=joined(shares)).model_dump(mode="json")
    manifest = b"".join(_json({"format": FORMAT, **text}))
    parse(manifest, aside / MANIFEST)
    write_hashed(files, aside / MANIFEST, iter([manifest]))
    write_hashed(files, aside / CHECKSUM, iter([checksum_line(manifest)]))
    files.sync(aside)
    if final.exists():  # from a run that went on from an earlier step: this one takes its place
        old = final.with_name(REPLACED + final.name)
        files.rename(final, old)
        files.rename(aside, final)
        files.sync(final.parent)
        files.remove(old)
    else:
        files.rename(aside, final)
        files.sync(final.parent)


def clean_up(files: Files, folder: Path) -> None:
    """Clear what a killed writer left in ``folder``; on the main rank, before the run looks for a checkpoint."""
    for old in sorted(folder.glob(f"{REPLACED}*")):
        final = old.with_name(old.name.removeprefix(REPLACED))
        if not final.exists():
            files.rename(old, final)
    for pattern in (ASIDE, REPLACED, REMOVING):
        for leftover in folder.glob(f"{pattern}*"):
            files.remove(leftover)


def together(run: Run, hooks: Hooks, what: str, action: Callable[[], T]) -> T:
    """Run ``action`` on this rank and wait for the others; if it failed on any, CheckpointError on all.

    What ranks tell each other goes through the strategy's own gather, as one number each.
    """
    result, failure = None, None
    try:
        result = action()
    except (OSError, CheckpointError) as error:
        failure = error
    code = torch.tensor([int(failure is not None)], device=run.world.device)
    codes = hooks.gather_outputs(run, {"failed": code})["failed"].tolist()
    if isinstance(failure, CheckpointError):
        raise failure
    if failure is not None:
        raise CheckpointError(f"{what}: {failure.filename or ''}: {failure.strerror or failure}") from failure
    if any(codes):
        raise CheckpointError(f"{what}: failed on rank {codes.index(1)}")
    return result  # type: ignore[return-value]  # no failure: it is what action returned


def _take(files: Files, final: Path, rank: int) -> Share:
    """Read what ``rank`` handed in, and remove the file, which does not belong to the checkpoint."""
    _, done = _share_files(final, rank)
    share = Share.model_validate_json(read_json(done))
    files.remove(done)
    return share


def _share_files(final: Path, rank: int) -> tuple[Path, Path]:
    name = f"rank-{rank:05d}.json"
    return aside_of(final) / f".{name}", aside_of(final) / name


def _json(value: dict[str, Any]) -> Iterator[bytes]:
    yield json.dumps(value, indent=1, ensure_ascii=False).encode()

"""Commit: a checkpoint is written aside, is on the disk to the last byte, and then appears by one rename."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distcore.checkpoint.files import Files
from distcore.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    STATE,
    Share,
    checksum_line,
    joined,
    parse,
    read_json,
    text_of,
)
from distcore.checkpoint.tensors import write_hashed

STAGING, REPLACED, REMOVING = ".writing-", ".replaced-", ".removing-"
"""What folders are called that are not, or no longer, checkpoints."""


def begin(files: Files, final: Path) -> None:
    """Make the folder aside, empty; on the main rank, before any rank writes."""
    staging = staging_of(final)
    if staging.exists():
        files.remove(staging)
    for folder in [above for above in reversed(staging.parents) if not above.exists()]:
        files.make_folder(folder)
        files.sync(folder.parent)
    files.make_folder(staging)


def staging_of(final: Path) -> Path:
    """Where ``final`` is written until it is whole."""
    return final.with_name(STAGING + final.name)


def publish_share(files: Files, final: Path, rank: int, share: Share) -> None:
    """Tell the main rank, by a file aside, what this rank wrote."""
    draft, done = _share_files(final, rank)
    files.write(draft, iter([share.model_dump_json().encode()]))
    files.rename(draft, done)


def is_published(final: Path, rank: int) -> bool:
    """Whether ``rank`` has written its share."""
    return _share_files(final, rank)[1].exists()


def commit(files: Files, final: Path, size: int, small: dict[str, Any]) -> None:
    """Join what ``size`` ranks wrote and make it the checkpoint ``final``; on the main rank, after all have written.

    Raises CheckpointError if their pieces do not make whole tensors.
    """
    staging = staging_of(final)
    shares = [_collect(files, final, rank) for rank in range(size)]
    entries = {name: entry for share in shares for name, entry in share.files.items()}
    entries[STATE] = write_hashed(files, staging / STATE, _json(small))
    manifest = text_of(Share(files=entries, tensors=joined(shares)))
    parse(manifest, staging / MANIFEST)
    write_hashed(files, staging / MANIFEST, iter([manifest]))
    write_hashed(files, staging / CHECKSUM, iter([checksum_line(manifest)]))
    files.sync(staging)
    _put_in_place(files, staging, final)


def _put_in_place(files: Files, staging: Path, final: Path) -> None:
    """Rename; a checkpoint of that step, from before the run went back to an earlier one, makes room first."""
    old = final.with_name(REPLACED + final.name)
    if final.exists():
        files.rename(final, old)
        files.sync(final.parent)
    files.rename(staging, final)
    files.sync(final.parent)
    if old.exists():
        files.remove(old)


def clean_up(files: Files, folder: Path) -> None:
    """Clear what a killed writer left in ``folder``; on the main rank, before the run looks for a checkpoint."""
    if not folder.is_dir():
        return
    for old in sorted(folder.glob(f"{REPLACED}*")):
        final = old.with_name(old.name.removeprefix(REPLACED))
        if not final.exists():
            files.rename(old, final)
    files.sync(folder)
    for pattern in (STAGING, REPLACED, REMOVING):
        for leftover in sorted(folder.glob(f"{pattern}*")):
            files.remove(leftover)


def discard(files: Files, final: Path) -> None:
    """Remove what is aside, as far as that goes: the disk may be full of it."""
    with contextlib.suppress(OSError):
        files.remove(staging_of(final))


def _collect(files: Files, final: Path, rank: int) -> Share:
    """Read what ``rank`` handed in, and remove the file, which does not belong to the checkpoint."""
    _, done = _share_files(final, rank)
    share = Share.model_validate_json(read_json(done))
    files.remove(done)
    return share


def _share_files(final: Path, rank: int) -> tuple[Path, Path]:
    name = f"rank-{rank:05d}.json"
    return staging_of(final) / f".{name}", staging_of(final) / name


def _json(value: dict[str, Any]) -> Iterator[bytes]:
    yield json.dumps(value, indent=1, ensure_ascii=False).encode()

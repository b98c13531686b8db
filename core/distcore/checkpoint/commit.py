"""Commit: a checkpoint is written to a staging folder, synced to disk, and renamed at once."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distcore.checkpoint.files import Files
from distcore.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    STATE,
    RankManifest,
    checksum_line,
    merge_tensors,
    parse,
    read_json,
    text_of,
)
from distcore.checkpoint.tensors import write_hashed

STAGING, REPLACED, REMOVING = ".writing-", ".replaced-", ".removing-"
"""Prefixes of folders that are unfinished, about to be replaced, and about to be removed."""


def begin(files: Files, final: Path) -> None:
    """Create an empty staging folder for ``final``; on the main rank, before any rank writes."""
    staging = staging_of(final)
    if staging.exists():
        files.remove(staging)
    missing = [folder for folder in staging.parents if not folder.exists()]
    for folder in reversed(missing):
        files.make_folder(folder)
        # Without it a crash may lose the new folder, and all that is in it.
        files.sync(folder.parent)
    files.make_folder(staging)


def staging_of(final: Path) -> Path:
    """Return the staging folder, in which ``final`` is written until it is complete."""
    return final.with_name(STAGING + final.name)


def publish_rank_manifest(
    files: Files, final: Path, rank: int, rank_manifest: RankManifest
) -> None:
    """Publish this rank's manifest to the main rank, as a file in the staging folder."""
    draft, done = _rank_manifest_paths(final, rank)
    files.write(draft, iter([rank_manifest.model_dump_json().encode()]))
    files.rename(draft, done)  # by a rename, so that the main rank never reads half a file


def published(final: Path) -> dict[int, RankManifest]:
    """Return the manifests of the ranks that have written all their files, by rank."""
    manifests = {}
    for file in sorted(staging_of(final).glob("rank-*.json")):
        rank = int(file.stem.removeprefix("rank-"))
        manifests[rank] = RankManifest.model_validate_json(read_json(file))
    return manifests


def is_published(final: Path, rank: int) -> bool:
    """Return True if ``rank`` has written all its files."""
    return _rank_manifest_paths(final, rank)[1].exists()


def commit(files: Files, final: Path, ranks: Iterable[int], job_state: dict[str, Any]) -> None:
    """Make the files that ``ranks`` wrote the checkpoint ``final``; one rank calls, after all.

    ``job_state`` becomes state.json. Raises CheckpointError if the pieces of a tensor leave gaps or
    overlap.
    """
    staging = staging_of(final)
    manifests = []
    for rank in ranks:
        _, done = _rank_manifest_paths(final, rank)
        manifests.append(RankManifest.model_validate_json(read_json(done)))
        files.remove(done)  # it is no part of the checkpoint
    entries = {name: entry for written in manifests for name, entry in written.files.items()}
    state = json.dumps(job_state, indent=1, ensure_ascii=False).encode()
    entries[STATE] = write_hashed(files, staging / STATE, iter([state]))
    manifest = text_of(RankManifest(files=entries, tensors=merge_tensors(manifests)))
    # Raises here, before the commit, rather than when somebody reads it.
    parse(manifest, staging / MANIFEST)
    write_hashed(files, staging / MANIFEST, iter([manifest]))
    write_hashed(files, staging / CHECKSUM, iter([checksum_line(manifest)]))
    files.sync(staging)
    _rename_into_place(files, staging, final)


def _rename_into_place(files: Files, staging: Path, final: Path) -> None:
    """Rename ``staging`` to ``final``; an older checkpoint of the same step makes way for it.

    There is one if the run was resumed from a checkpoint before it. It is renamed first and removed
    last, so that a crash between the two leaves one of both.
    """
    old = final.with_name(REPLACED + final.name)
    if final.exists():
        files.rename(final, old)
        files.sync(final.parent)
    files.rename(staging, final)
    files.sync(final.parent)
    if old.exists():
        files.remove(old)


def clean_up(files: Files, folder: Path) -> None:
    """Remove unfinished folders of killed runs from ``folder``; the main rank calls first."""
    if not folder.is_dir():
        return
    for old in sorted(folder.glob(f"{REPLACED}*")):
        final = old.with_name(old.name.removeprefix(REPLACED))
        # Killed between the two renames: the old checkpoint is still the valid one.
        if not final.exists():
            files.rename(old, final)
    files.sync(folder)
    for pattern in (STAGING, REPLACED, REMOVING):
        for leftover in sorted(folder.glob(f"{pattern}*")):
            files.remove(leftover)


def discard(files: Files, final: Path) -> None:
    """Remove the staging folder after a failure, if possible, because it may fill the disk."""
    for _ in range(20):  # another rank may write into it meanwhile, until it has nowhere to
        with contextlib.suppress(OSError):
            files.remove(staging_of(final))
        if not staging_of(final).exists():
            return
        time.sleep(0.05)


def _rank_manifest_paths(final: Path, rank: int) -> tuple[Path, Path]:
    """Return the files of a rank's manifest: while it is written, and when it is published."""
    name = f"rank-{rank:05d}.json"
    return staging_of(final) / f".{name}", staging_of(final) / name

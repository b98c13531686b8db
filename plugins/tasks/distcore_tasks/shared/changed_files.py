"""The files of ``data``, in the run folder: a resume names the one that changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path

from distcore import DataError, Dataset, RunConfig
from distcore_tasks.shared.options import TaskOptions

FILES = "data_files.json"
"""File of a run folder with the name, SHA-256 and number of rows of each file of ``data``, and a
digest of its rows.
"""
File = tuple[str, str, int]
"""These of one file."""
Files = Sequence[File] | Callable[[], Sequence[File]]
"""Those of all files, or a function that lists them."""


@dataclass(frozen=True, slots=True)
class Change:
    """A file that is not what it was when the run began."""

    error: DataError
    """The line for the user."""
    content: str | None
    """The digest of the training rows then."""

    def check(self, rows: Dataset) -> None:
        """Raise the error if the training rows have changed with the file: of a stored row
        only its encoding counts.
        """
        if self.content not in (None, getattr(rows, "content", None)):
            raise self.error


def write_files(folder: Path, files: Files, rows: Dataset) -> None:
    """Write the list of files, if there are any, with the digest of the training ``rows``."""
    if files := files() if callable(files) else files:
        listed = {"content": getattr(rows, "content", None), "files": files}
        (folder / FILES).write_text(
            json.dumps(listed, ensure_ascii=False, indent=0), encoding="utf-8"
        )


def check_files(files: Sequence[File], options: TaskOptions, config: RunConfig) -> None:
    """Raise DataError on a resume for the first file that is not what it was when the run began."""
    if change := find_change(files, options, config):
        raise change.error


def find_change(files: Sequence[File], options: TaskOptions, config: RunConfig) -> Change | None:
    """Return the first file that on a resume is not what it was when the run began, unless
    other rows are wanted.
    """
    changed = [key.removeprefix("task_options.") for key in config.resume_changed or ()]
    if config.resume is None or any(options.on_resume.get(key) == "other rows" for key in changed):
        return None
    run = (
        Path(str(config.out))
        if config.resume == "auto"
        else Path(config.resume).resolve().parent.parent
    )
    listed = run / FILES
    if not listed.is_file() or not any((run / "checkpoints").glob("step-*")):
        return None
    said = json.loads(listed.read_text("utf-8"))
    # of an older run
    content, given = (said["content"], said["files"]) if isinstance(said, dict) else (None, said)
    then = [(str(name), str(digest), int(rows)) for name, digest, rows in given]
    ends = [0, *accumulate(rows for *_, rows in then)]
    for place, (was, now) in enumerate(zip_longest(then, files)):
        if was and now and was[1] == now[1]:
            continue
        first, end = ends[min(place, len(then))] + 1, ends[min(place + 1, len(then))]
        where = f"rows {first} to {end} of data" if end >= first else f"from row {first} of data on"
        back = f"put back what was there when {run} began, or begin another run"
        return Change(DataError(f"data file {_difference(was, now)}: {where}; {back}"), content)
    return None


def _difference(was: File | None, now: File | None) -> str:
    if now is None:
        assert was
        return f"{was[0]}: is missing on resume"
    if was is None:
        return f"{now[0]}: is new on resume"
    return (
        f"{now[0]}: has changed on resume"
        if was[0] == now[0]
        else f"{now[0]}: is not {was[0]}, as before the resume"
    )

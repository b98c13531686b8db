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
"""File of a run folder that lists the files of ``data``, with a digest of the training rows."""
File = tuple[str, str, int]
"""Name, SHA-256 and number of rows of a file."""
Files = Sequence[File] | Callable[[], Sequence[File]]
"""All files, or a function that lists them."""


@dataclass(frozen=True, slots=True)
class Change:
    """A file that is not what it was when the run began."""

    error: DataError
    """The line for the user."""
    content: str | None
    """The digest of the training rows when the run began."""

    def check(self, rows: Dataset) -> None:
        """Raise the error if the training rows have changed with the file.

        A change that leaves the encoding of all rows as it was does not count.
        """
        if self.content not in (None, getattr(rows, "content", None)):
            raise self.error


def write_files(folder: Path, files: Files, rows: Dataset) -> None:
    """Write the list of files, if there are any, with the digest of the training ``rows``."""
    if callable(files):
        files = files()
    if files:
        record = {"content": getattr(rows, "content", None), "files": files}
        text = json.dumps(record, ensure_ascii=False, indent=0)
        (folder / FILES).write_text(text, encoding="utf-8")


def check_files(files: Sequence[File], options: TaskOptions, config: RunConfig) -> None:
    """Raise DataError on a resume for the first file that is not what it was when the run began."""
    if change := find_change(files, options, config):
        raise change.error


def find_change(files: Sequence[File], options: TaskOptions, config: RunConfig) -> Change | None:
    """Return the first file that on a resume is not what it was when the run began.

    Returns ``None`` if a changed option asks for other rows.
    """
    if config.resume is None:
        return None
    for key in config.resume_changed or ():
        if options.on_resume.get(key.removeprefix("task_options.")) == "other rows":
            return None
    if config.resume == "auto":
        run = Path(str(config.out))
    else:
        run = Path(config.resume).resolve().parent.parent
    file = run / FILES
    if not file.is_file() or not any((run / "checkpoints").glob("step-*")):
        return None
    record = json.loads(file.read_text("utf-8"))
    content: str | None = None
    if isinstance(record, dict):
        content, record = record["content"], record["files"]
    # Otherwise an older version has written the list of files alone.
    before: list[File] = [(str(name), str(digest), int(rows)) for name, digest, rows in record]
    # Number of rows before each file, and of all.
    ends = [0, *accumulate(rows for *_, rows in before)]
    for number, (was, now) in enumerate(zip_longest(before, files)):
        if was and now and was[1] == now[1]:
            continue
        first = ends[min(number, len(before))] + 1
        end = ends[min(number + 1, len(before))]
        where = f"rows {first} to {end} of data" if end >= first else f"from row {first} of data on"
        remedy = f"put back what was there when {run} began, or begin another run"
        error = DataError(f"data file {_difference(was, now)}: {where}; {remedy}")
        return Change(error, content)
    return None


def _difference(was: File | None, now: File | None) -> str:
    """Return the name of a file, and how it differs from the one before the resume."""
    if now is None:
        assert was
        return f"{was[0]}: is missing on resume"
    if was is None:
        return f"{now[0]}: is new on resume"
    if was[0] == now[0]:
        return f"{now[0]}: has changed on resume"
    return f"{now[0]}: is not {was[0]}, as before the resume"

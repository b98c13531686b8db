"""Check what a checkpoint depends on outside of it: its run's rows, task files, and user's code."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distcore.checkpoint.job_state import saved_config
from distcore.checkpoint.row_content import RowContent
from distcore.config import RunConfig
from distcore.errors import CheckpointError
from distcore.files import sha256_of

log = logging.getLogger("distcore")
SOURCES = "sources"
"""Key of the digests of the user's files in state.json."""


def source_digests(config: RunConfig, task: str | None = None) -> dict[str, str]:
    """Return the SHA-256 of each file with a class of the user's: of a task or an optimizer.

    ``task`` replaces the config's.
    """
    names = {"task": task or config.task, "optimizer.name": config.optimizer.name}
    digests = {}
    for key, name in names.items():
        file, separator, _ = name.rpartition(".py:")
        if separator and (path := Path(f"{file}.py")).is_file():
            digests[key] = sha256_of(path)
    return digests


def warn_of_changed_sources(
    path: Path, job_state: Mapping[str, Any], config: RunConfig, task: str | None = None
) -> None:
    """Log a warning for a file of the user's code that has changed since the checkpoint's run.

    The weights may fit another model of the same shapes, so nothing else would show it.
    ``task`` replaces the config's.
    """
    saved = job_state.get(SOURCES)
    names = {"task": task or config.task, "optimizer.name": config.optimizer.name}
    for key, digest in source_digests(config, task).items():
        before = saved.get(key) if isinstance(saved, dict) else None
        if before not in (None, digest):
            file = names[key].rpartition(":")[0]
            log.warning(
                "%s: %s has changed since the run that saved it: model, rows or loss may be others;"
                " restore it, or name the file that it was by --task",
                path.name,
                file,
            )


def save_task_files(out: Path, save: Callable[[Path], None]) -> dict[str, str]:
    """Let ``save`` write a task's files into the run folder ``out``; return their SHA-256 by name.

    They are written to another folder and then moved, so that they replace the files of an earlier
    attempt.
    """
    with TemporaryDirectory(dir=out, prefix=".task-") as temporary:
        source = Path(temporary)
        save(source)
        files = [path for path in source.rglob("*") if path.is_file()]
        names = sorted(file.relative_to(source) for file in files)
        digests = {str(name): sha256_of(source / name) for name in names}
        for name in names:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(source / name, out / name)
    return digests


def check_task_files(path: Path, job_state: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a file of the task, such as labels.json, that has been edited.

    A checkpoint that was moved out of its run folder has none of them.
    """
    folder = path.resolve().parent.parent
    saved = job_state.get("task_files")
    if not isinstance(saved, dict):
        return
    for name, digest in saved.items():
        file = folder / name
        is_inside = ".." not in Path(name).parts
        if is_inside and file.is_file() and sha256_of(file) != digest:
            raise CheckpointError(
                f"{file}: is not the file that the run of {path.name} saved: outputs would get"
                " other names; restore it, or resume the run, which writes it again"
            )


def check_rows(
    path: Path, job_state: Mapping[str, Any], config: RunConfig, rows: str, content: RowContent
) -> None:
    """Raise CheckpointError if ``config``, as the run trained, now leads to other training rows.

    Classes and split follow from them: an evaluation would give outputs other names, and might
    count trained rows. ``rows`` is their fingerprint, ``content`` their digest. A config with other
    task options is not compared, unless only ``test_data`` differs.
    """
    options_before = dict(saved_config(dict(job_state), path).task_options)
    options_now = dict(config.task_options)
    options_before["test_data"] = options_now.get("test_data")
    options_now.setdefault("test_data", None)
    if options_before != options_now:
        return
    if job_state.get("data") not in (rows, None) or not content.matches(job_state):
        source = f" ({config.task_options['data']})" if "data" in config.task_options else ""
        raise CheckpointError(
            f"{path}: the training data{source} are not the rows that its run trained on: classes"
            " and split would be others, and trained rows could be evaluated; restore the data, or"
            " use 'distcore predict', which needs none"
        )

"""Check the dependencies of a checkpoint outside of it: the rows of its run, and the task's saved files."""

from __future__ import annotations

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


def save_task_files(out: Path, save: Callable[[Path], None]) -> dict[str, str]:
    """Have ``save`` write a task's files into the run folder ``out``; return the SHA-256 of each by its name.

    They are written to another folder and then moved, so that they replace the files of an earlier attempt.
    """
    with TemporaryDirectory(dir=out, prefix=".task-") as apart:
        save(Path(apart))
        files = sorted(file.relative_to(apart) for file in Path(apart).rglob("*") if file.is_file())
        digests = {str(name): sha256_of(Path(apart, name)) for name in files}
        for name in files:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(apart, name), out / name)
    return digests


def check_task_files(path: Path, job_state: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a file of the task, such as labels.json, that was edited after the run saved it.

    A checkpoint that was moved out of its run folder has none of them.
    """
    folder = path.resolve().parent.parent
    saved = job_state.get("task_files")
    for name, digest in (saved if isinstance(saved, dict) else {}).items():
        file = folder / name
        if ".." not in Path(name).parts and file.is_file() and sha256_of(file) != digest:
            raise CheckpointError(
                f"{file}: is not the file that the run of {path.name} saved: outputs would get other names; "
                "restore it, or resume the run, which writes it again"
            )


def check_rows(path: Path, job_state: Mapping[str, Any], config: RunConfig, rows: str, content: RowContent) -> None:
    """Raise CheckpointError if ``config``, as the run trained, now leads to other training rows.

    Classes and split follow from them: an evaluation would give outputs other names, and might count trained rows.
    ``rows`` is their fingerprint, ``content`` their digest. A config with other task options is not compared, but for
    other ``test_data``.
    """
    then, now = (dict(one.task_options) for one in (saved_config(dict(job_state), path), config))
    then["test_data"] = now.get("test_data")
    now.setdefault("test_data", None)
    if then == now and (job_state.get("data") not in (rows, None) or not content.matches(job_state)):
        source = f" ({config.task_options['data']})" if "data" in config.task_options else ""
        raise CheckpointError(
            f"{path}: the training data{source} are not the rows that its run trained on: classes and split would "
            "be others, and trained rows could be evaluated; restore the data, or use 'distcore predict', which needs "
            "none"
        )

"""The folder of a run: choose a name, check that it can be created, and write files
on the main rank.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from distcore import checkpoint
from distcore.config import GIVEN, RunConfig, with_changes
from distcore.config.loading import NOT_THE_JOB
from distcore.distributed.agreement import on_all_ranks
from distcore.errors import ConfigError
from distcore.files import is_locked, lock_shared
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks

log = logging.getLogger("distcore")
LINGERING = 6.0
"""Seconds for which processes of a killed run, such as those that load data, may outlive it."""
FINISHED = "another run", "set it aside with --overwrite, or go on"
UNKNOWN = "a run without a checkpoint", "or if that has ended begin it again"
"""What a folder may hold, and what to do with it."""


def new_run_folder(config: RunConfig) -> str:
    """Return a new folder name: the time, and a number if another run started
    in the same second.
    """
    name_of_task = Path(config.task).name.removeprefix(GIVEN)
    # Of file.py:Class both, and no character that a shell or a file system treats specially.
    task = re.sub(r"[^\w-]+", "-", name_of_task.replace(".py:", "-"))
    name = f"{task}-{config.strategy}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path("runs") / name
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{name}-{number}")
    return str(folder)


def check_out(config: RunConfig) -> None:
    """Raise ConfigError if the run folder cannot be created, or has a run that this one neither
    resumes nor sets aside.

    Creates nothing: a run that is refused for another reason must not leave a folder behind.
    """
    if config.overwrite and config.resume:
        raise ConfigError(
            f"--overwrite begins anew, and --resume {config.resume} goes on; keep one of them"
        )
    folder = Path(str(config.out))
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out = {str(folder)!r}: is a file, not a folder")
    is_resumed = config.resume == "auto"
    if config.resume and not is_resumed:
        # By the path of a checkpoint, perhaps of this folder.
        is_resumed = folder.resolve() in Path(config.resume).resolve().parents
    has_config = (folder / "config.yaml").exists()
    if has_config and not _is_of_a_run(folder):
        raise ConfigError(
            f"out = {str(folder)!r}: holds a config.yaml that no run wrote; choose another folder"
        )
    if has_config and config.overwrite and not folder.name:
        raise ConfigError(
            f"out = {str(folder)!r}: the current folder cannot be set aside; choose another"
        )
    is_overwritten = config.overwrite and not _is_started_again()
    if has_config and not is_resumed and not is_overwritten and not _is_left_over(folder):
        run, verb = FINISHED if has_checkpoint(folder) else UNKNOWN
        raise ConfigError(
            f"out = {str(folder)!r}: holds {run}; choose another, {verb} with --resume auto"
        )
    if (is_resumed or is_overwritten) and _is_trained_elsewhere(folder):
        raise ConfigError(
            f"out = {str(folder)!r}: another process is training this run; end it first, or wait"
            " for it"
        )
    above = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        # By trying: a file system may refuse what permissions allow.
        TemporaryDirectory(dir=above).cleanup()
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be created: {above}: {error.strerror}") from None


def _is_trained_elsewhere(out: Path) -> bool:
    """Return True if a run holds the folder longer than what is left of one
    that was killed does.
    """
    for _ in range(int(LINGERING / 0.1)):
        if not is_locked(out / "config.yaml"):
            return False
        time.sleep(0.1)
    return True


def has_checkpoint(out: Path) -> bool:
    """Return True if the run folder has a checkpoint, whole or not."""
    return any((out / "checkpoints").glob("step-*"))


def set_aside(config: RunConfig) -> None:
    """Rename the run folder if an earlier run ended in it without a checkpoint, or this one is to
    overwrite it, unless this run resumes it.

    ``check_out`` has looked at the folder before. Called once, when nothing else can refuse the
    run: an earlier run stays where it is as long as no other takes its place.
    """
    out = Path(str(config.out))
    is_overwritten = config.overwrite and (out / "config.yaml").exists()
    if config.resume or not (is_overwritten or _is_left_over(out)):
        return
    names = (f"{out.name}.old-{number}" for number in count(1))
    aside = next(path for path in map(out.with_name, names) if not path.exists())
    which = "the earlier run" if has_checkpoint(out) else "a run that ended without a checkpoint"
    out.rename(aside)
    log.info("out = %r: %s is now %s", str(out), which, aside)


def _is_started_again() -> bool:
    """Return True in a rank that torchelastic has started anew: the run in the folder is then
    the one that it has begun itself.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _is_of_a_run(out: Path) -> bool:
    """Return True if a run has recorded the config.yaml of a folder: it has all keys."""
    if has_checkpoint(out):
        return True
    text = (out / "config.yaml").read_text(encoding="utf-8", errors="replace")
    lines = f"\n{text}"
    keys = RunConfig.model_fields.keys() - NOT_THE_JOB
    return all(f"\n{key}:" in lines for key in keys)


def _is_left_over(out: Path) -> bool:
    """Return True if a run began in the folder, saved nothing, and has ended; False
    where nobody can tell.
    """
    file = out / "config.yaml"
    # The current folder has no name, and cannot be renamed.
    if not out.name or not file.exists() or not _is_of_a_run(out):
        return False
    if has_checkpoint(out) or is_locked(file):
        return False
    # On a file system without locks nobody can tell whether the run has ended.
    with lock_shared(file) or nullcontext() as held:
        return held is not None


def after_failure(config: RunConfig) -> RunConfig:
    """Return the config of a restart: from its own newest checkpoint or, without one, from
    where the job began.
    """
    newest = checkpoint.find("auto", Path(str(config.out)))
    if newest is None and config.resume:
        return config
    return with_changes(config, {"resume": "auto", "overwrite": False})


def on_main(run: Run, hooks: Hooks, write: Callable[[Path], None]) -> None:
    """Write to the run folder on the main rank; if that fails, every rank raises
    CheckpointError or a TaskError.
    """
    out = Path(str(run.config.out))
    on_all_ranks(
        run,
        hooks,
        f"run folder {out} cannot be written",
        partial(write, out) if run.world.is_main else None,
    )

"""A small state that is committed without a run, and file layers that fail: shared
by the checkpoint tests.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from distcore import RunConfig, Task
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.commit import begin, commit
from distcore.checkpoint.files import Files
from distcore.checkpoint.saver import Saver
from distcore.checkpoint.writer import blocks_to_write, write_share
from distcore.engine.build import build_run
from distcore.engine.trainer import set_up
from distcore.plugin.strategy.contract import RankInfo
from distcore.plugin.strategy.state import State
from distcore.resolve.resolve import resolve
from distcore.testing.lab import Unsynced
from distcore.testing.problem import Problem


def state(value: float) -> State:
    """A model of two tensors, all of whose elements tell which checkpoint they belong to."""
    return {
        "model/weight": torch.full((40,), value),
        "optimizer/weight/exp_avg": torch.full((40,), -value),
    }


def write(
    folder: Path,
    states: list[State],
    step: int = 1,
    files: Files | None = None,
    limit: int = 2**30,
    best: dict[str, Any] | None = None,
) -> Path:
    """Commit what these ranks hold; ``best`` is the best evaluation so far."""
    files, final = files or Unsynced(), folder / f"step-{step:08d}"
    begin(files, final)
    for rank, held in enumerate(states):
        write_share(files, final, blocks_to_write(held, rank, len(states), limit), rank, limit)
    commit(files, final, range(len(states)), {"progress": {}, "best": best})
    return final


def value_in(path: Path) -> float:
    """Load everything, as a resume does, and return the value that all of it agrees on."""
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    checkpoint.job_state()
    values = set(checkpoint["model/weight"].tolist()) | set(
        (-checkpoint["optimizer/weight/exp_avg"]).tolist()
    )
    assert len(values) == 1
    return float(values.pop())


class Crash(BaseException):
    """The machine stops; not an error that anything could handle."""


class Recorder(Unsynced):
    """Stops the machine at one operation, before or after it, and then forgets what was not synced.

    A file that was not synced is cut short; a name that was not synced (of a new file, of a
    renamed one) goes back.
    """

    def __init__(self, stop_at: int, after: bool) -> None:
        self.stop_at, self.after = stop_at, after
        self.operations: list[str] = []
        self._bytes: list[Path] = []
        self._names: list[tuple[Path, Callable[[], object]]] = []

    def make_folder(self, path: Path) -> None:
        self._do("make_folder", lambda: super(Recorder, self).make_folder(path))
        self._names.append((path.parent, lambda: shutil.rmtree(path, ignore_errors=True)))

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        def write() -> None:
            super(Recorder, self).write(path, chunks)
            self._bytes.append(path)
            self._names.append((path.parent, lambda: path.unlink(missing_ok=True)))

        self._do("write", write)

    def sync(self, path: Path) -> None:
        def sync() -> None:
            self._bytes = [file for file in self._bytes if file != path]
            self._names = [(folder, undo) for folder, undo in self._names if folder != path]

        self._do("sync", sync)

    def rename(self, old: Path, new: Path) -> None:
        def rename() -> None:
            super(Recorder, self).rename(old, new)
            self._bytes = [
                new / file.relative_to(old) if file.is_relative_to(old) else file
                for file in self._bytes
            ]
            self._names.append((new.parent, lambda: new.rename(old) if new.exists() else None))

        self._do("rename", rename)

    def remove(self, path: Path) -> None:
        self._do("remove", lambda: super(Recorder, self).remove(path))

    def lose(self) -> None:
        """The power is back: only what was synced is there."""
        for file in self._bytes:
            if file.exists():
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        for _, undo in reversed(self._names):
            undo()

    def _do(self, name: str, operation: Callable[[], object]) -> None:
        here = len(self.operations) == self.stop_at
        self.operations.append(name)
        if here and not self.after:
            raise Crash
        operation()
        if here:
            raise Crash


class Disk(Unsynced):
    """A disk that can be full, and a gate that holds writing up while it is closed."""

    def __init__(self) -> None:
        self.full = False
        self.gate = threading.Event()
        self.gate.set()

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        self.gate.wait(20)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().write(path, chunks)


def saver(
    out: Path, disk: Files, asynchronous: bool, keep_last: int = 2, task: Task | None = None
) -> tuple[Saver, Any]:
    task = task or Problem()
    checkpoints = {"asynchronous": asynchronous, "keep_last": keep_last, "best": None}
    extensions = {"progress": False}
    config = RunConfig(
        out=str(out), device="cpu", lr=5e-4, checkpoints=checkpoints, extensions=extensions
    )
    resolved = resolve(config, task=task)
    hooks, world = set_up(resolved, RankInfo())
    run = build_run(
        resolved.config, hooks, world, resolved.task, resolved.task.prepare(resolved.config)
    )
    return Saver(run, hooks, {"data": "rows", "task_files": {}}, disk), run

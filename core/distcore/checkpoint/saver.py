"""The checkpoints of a running training: when it is told to, in line or beside the steps that follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from distcore import checkpoint
from distcore.checkpoint.commit import begin, commit, discard, is_published, publish_share, staging_of
from distcore.checkpoint.files import Files
from distcore.checkpoint.job_state import small_state
from distcore.checkpoint.writer import Block, blocks_of, in_memory, write_share
from distcore.distributed.agreement import on_all_ranks
from distcore.errors import CheckpointError
from distcore.plugin.contract import Progress, Run
from distcore.plugin.hooks import Hooks

POLL = 0.02
"""Seconds between two looks at what other ranks have written."""


class Saver:
    """Saves, tells the extensions, and lets go of what is neither recent nor the best. At most one save is in flight.

    Every rank makes the same calls.
    """

    def __init__(self, run: Run, hooks: Hooks, data: str, files: Files | None = None) -> None:
        """``data`` is the fingerprint of the training rows."""
        self._run, self._hooks, self._data = run, hooks, data
        self._files = files or Files()
        self._folder = Path(str(run.config.out)) / "checkpoints"
        self._flight: tuple[Future[Path], Progress] | None = None

    def save(self, progress: Progress, best: dict[str, Any] | None) -> None:
        """Commit a checkpoint; with ``checkpoints.asynchronous`` return once the state is copied.

        ``best`` describes the best evaluation so far, with its ``step``. Raises CheckpointError, of this save or of
        the one before.
        """
        self.wait()
        run, hooks, facts = self._run, self._hooks, {"best": best, "data": self._data}
        if run.config.checkpoints.asynchronous:
            self._flight = (self._take_off(progress, facts), progress)
            return
        path = checkpoint.save(run, hooks, progress, self._folder, facts, self._files)
        self._retain(best)
        hooks.on_checkpoint(run, progress, path)

    def check(self) -> None:
        """After each step: raises CheckpointError if the save beside it has failed; costs nothing otherwise."""
        if self._flight and self._flight[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait until no save is in flight."""
        if self._flight:
            (future, progress), self._flight = self._flight, None
            path = future.result()
            self._hooks.on_checkpoint(self._run, progress, path)

    def _take_off(self, progress: Progress, facts: dict[str, Any]) -> Future[Path]:
        """Copy the state, and have a thread write it. Ranks meet here for the last time: the rest goes by files."""
        run, hooks, final = self._run, self._hooks, self._folder / f"step-{progress.step:08d}"
        blocks = in_memory(blocks_of(hooks.save_checkpoint(run), run.world.rank, run.world.size))
        small = small_state(run, progress) | facts
        start = partial(begin, self._files, final) if run.world.is_main else lambda: None
        on_all_ranks(run, hooks, f"checkpoint {final} could not be written", start)
        return _beside(lambda: self._write(final, blocks, small))

    def _write(self, final: Path, blocks: list[Block], small: dict[str, Any]) -> Path:
        world, files = self._run.world, self._files
        try:
            publish_share(files, final, world.rank, write_share(files, staging_of(final), blocks, world.rank))
            if world.is_main:
                self._await(lambda: all(is_published(final, rank) for rank in range(world.size)), final)
                commit(files, final, world.size, small)
                self._retain(small["best"])
            else:
                self._await(lambda: not staging_of(final).exists(), final)
                if not final.exists():
                    raise CheckpointError("another rank gave it up")
        except (OSError, CheckpointError) as error:
            discard(files, final)  # the other ranks see that it is gone
            raise CheckpointError(f"checkpoint {final} could not be written: {error}") from error
        return final

    def _await(self, condition: Callable[[], bool], final: Path) -> None:
        deadline = time.monotonic() + self._run.config.timeout
        while not condition():
            if not staging_of(final).exists() and not final.exists():
                raise CheckpointError("another rank gave it up")
            if time.monotonic() > deadline:
                raise CheckpointError(f"other ranks did not write their share in {self._run.config.timeout} s")
            time.sleep(POLL)

    def _retain(self, best: dict[str, Any] | None) -> None:
        if self._run.world.is_main:
            step = best["step"] if best else None
            checkpoint.retain(self._folder, self._run.config.checkpoints.keep_last, step, self._files)


def _beside(work: Callable[[], Path]) -> Future[Path]:
    future: Future[Path] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="distcore-checkpoint", daemon=True).start()
    return future

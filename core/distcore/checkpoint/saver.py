"""Save checkpoints during training: in the foreground, or in a background
thread while training continues.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Thread, get_native_id
from typing import Any, TextIO

import psutil
import torch
from torch import Tensor

from distcore import checkpoint
from distcore.checkpoint.commit import begin, commit, discard, is_published, staging_of
from distcore.checkpoint.files import Files
from distcore.checkpoint.job_state import collect_job_state
from distcore.checkpoint.read_back import check_is_model
from distcore.checkpoint.rescue import save_alone
from distcore.checkpoint.retention import retain
from distcore.checkpoint.row_content import RowContent
from distcore.checkpoint.writer import (
    Block,
    blocks_to_write,
    copy_to_cpu,
    state_to_save,
    write_share,
)
from distcore.distributed.agreement import check_agreed, on_all_ranks
from distcore.errors import CheckpointError
from distcore.plugin.strategy.contract import Progress, Run
from distcore.plugin.strategy.hooks import Hooks

log = logging.getLogger("distcore")
POLL = 0.02
"""Seconds between two checks for the files of other ranks."""


class Saver:
    """Saves checkpoints, calls ``on_checkpoint``, and removes those that are neither
    recent nor the best.

    At most one save is in progress. Every rank makes the same calls.
    """

    def __init__(
        self,
        run: Run,
        hooks: Hooks,
        facts: dict[str, Any],
        files: Files | None = None,
        content: RowContent | None = None,
        held: Sequence[TextIO | None] = (),
    ) -> None:
        """``facts`` are entries of state.json: fingerprints of the rows, digests of the files
        that the task saved.

        ``files`` replaces the file system in tests. ``content`` is the digest of the rows, once it
        is known. ``held`` are files that show that the run lives, until ``close``.
        """
        self._run, self._hooks = run, hooks
        self._facts = facts
        self._files, self._content, self._held = files or Files(), content, held
        self._folder = Path(str(run.config.out)) / "checkpoints"
        self._pending: tuple[Future[Path], Progress] | None = None
        self._memory: dict[str, Tensor] = {}
        self._proves = True  # the first save of a run, and of one that goes on, proves itself
        self._is_beside = None if run.config.checkpoints.asynchronous else False

    def save(
        self,
        progress: Progress,
        best: dict[str, Any] | None,
        unlogged: tuple[float, int] = (0.0, 0),
    ) -> None:
        """Commit a checkpoint; with ``checkpoints.asynchronous`` return as soon as the state
        is copied to memory.

        ``best``: the best evaluation so far, with its ``step``. ``unlogged``: the sum of the loss
        since the last log line, and the items in it. Raises CheckpointError if this save or the
        last fails.
        """
        self.wait()
        run, hooks = self._run, self._hooks
        facts = self._facts_with(best, self._agreed_states())
        facts |= {"unlogged": {"loss": unlogged[0], "items": unlogged[1]}} if unlogged[1] else {}
        if self._is_beside is not False:
            state = state_to_save(run, hooks)
            if self._proves:
                on_all_ranks(
                    run,
                    hooks,
                    "checkpoint",
                    partial(check_is_model, run, state, hooks.computed_weights),
                )
            blocks = blocks_to_write(state, run.world.rank, run.world.size)
            if self._is_beside is None:
                self._is_beside = have_room(run, hooks, blocks)
            if self._is_beside:
                self._pending = (self._start_background_save(blocks, progress, facts), progress)
                self._proves = False
                return
        path = checkpoint.save(
            run, hooks, progress, self._folder, facts, self._files, proves=self._proves
        )
        self._proves = False
        self._retain(best)
        hooks.on_checkpoint(run, progress, path)

    def rescue(self, progress: Progress, best: dict[str, Any] | None) -> None:
        """Save ``progress`` from memory, as peers are gone; see ``save_alone``."""
        run, hooks, final = self._run, self._hooks, self._folder / f"step-{progress.step:08d}"
        facts = self._facts_with(best, hooks.states())
        state = hooks.save_checkpoint(run) | (run.ema or {})
        job_state = collect_job_state(run, progress) | facts
        if not final.exists() and save_alone(run, state, final, self._files, job_state):
            log.warning("other ranks are gone: step %d is saved from memory", progress.step)

    def close(self) -> None:
        """Show others that the run is over; first, what was copied before an error is written, if
        others do so, too.
        """
        if self._pending:
            wait([self._pending[0]], None if self._run.world.size == 1 else 5.0)
        for file in filter(None, self._held):
            file.close()

    def _agreed_states(self) -> dict[str, object]:
        if states := self._hooks.states():
            check_agreed(
                self._run,
                self._hooks,
                **{f"state() of {name}": state for name, state in states.items()},
            )
        return states

    def _facts_with(self, best: dict[str, Any] | None, states: dict[str, object]) -> dict[str, Any]:
        rows = {"rows": self._content.known} if self._content and self._content.known else {}
        return {"best": best, **self._facts, **rows} | ({"states": states} if states else {})

    def check(self) -> None:
        """Raise CheckpointError if a save beside training has failed here; of others all ranks
        hear at one step.
        """
        writing = self._pending[0] if self._pending else None
        if (
            writing
            and writing.done()
            and not isinstance(writing.exception(), ConnectionError | None)
        ):
            self.wait()  # not for a ConnectionError: the rank that failed says why

    def wait(self) -> None:
        """Wait for the save in progress, if any; raises CheckpointError if it
        failed, ConnectionError if elsewhere.
        """
        if self._pending:
            (future, progress), self._pending = self._pending, None
            path = future.result()
            self._hooks.on_checkpoint(self._run, progress, path)

    def _start_background_save(
        self, blocks: list[Block], progress: Progress, facts: dict[str, Any]
    ) -> Future[Path]:
        """Start a thread that writes a copy. It runs no collectives, beside those of training:
        ranks meet by files.
        """
        run, hooks, final = self._run, self._hooks, self._folder / f"step-{progress.step:08d}"
        blocks = copy_to_cpu(blocks, self._memory)
        # listeners go on with their states
        job_state = deepcopy(collect_job_state(run, progress) | facts)
        start = partial(begin, self._files, final) if run.world.is_main else None
        on_all_ranks(run, hooks, f"checkpoint {final} could not be written", start)
        return _in_background(partial(self._write, final, blocks, job_state, self._proves))

    def _write(
        self, final: Path, blocks: list[Block], job_state: dict[str, Any], reads_back: bool = False
    ) -> Path:
        world, files = self._run.world, self._files
        try:
            write_share(files, final, blocks, world.rank, reads_back=reads_back)
            if world.is_main:
                self._wait_until(
                    lambda: all(is_published(final, rank) for rank in range(world.size)), final
                )
                commit(files, final, range(world.size), job_state)
                self._retain(job_state["best"])
            else:
                self._wait_until(lambda: final.exists() and not staging_of(final).exists(), final)
        except (OSError, CheckpointError) as error:
            # Files that are gone under this rank's hands: another one failed, and
            # removes the folder.
            is_gone = isinstance(error, FileNotFoundError) or not (
                staging_of(final).exists() or final.exists()
            )
            is_elsewhere = world.size > 1 and is_gone
            discard(files, final)  # other ranks wait for it to be committed or to disappear
            kind = ConnectionError if is_elsewhere else CheckpointError
            raise kind(f"checkpoint {final} could not be written: {error}") from error
        return final

    def _wait_until(self, condition: Callable[[], bool], final: Path) -> None:
        deadline = time.monotonic() + self._run.config.timeout
        while not condition():
            if not staging_of(final).exists() and not final.exists():
                raise CheckpointError("another rank could not write its part")
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"other ranks did not finish writing within {self._run.config.timeout} s"
                )
            time.sleep(POLL)

    def _retain(self, best: dict[str, Any] | None) -> None:
        if self._run.world.is_main:
            step = best["step"] if best else None
            retain(self._folder, self._run.config.checkpoints.keep_last, step, self._files)


def have_room(run: Run, hooks: Hooks, blocks: list[Block]) -> bool:
    """Return True if a copy of all ranks' blocks takes less than half of the memory that is
    left on each machine.
    """
    needed = sum(block.values.nbytes for block in blocks) * int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )
    mine = torch.tensor([needed < psutil.virtual_memory().available / 2], device=run.world.device)
    if not (is_enough := bool(hooks.gather_outputs(run, {"room": mine})["room"].all())):
        log.info("training waits while checkpoints are written, as there is no memory for a copy")
    return is_enough


def _in_background(work: Callable[[], Path]) -> Future[Path]:
    future: Future[Path] = Future()

    def run() -> None:
        if sys.platform == "linux":  # elsewhere threads have no niceness of their own
            # a thirtieth of a core that training keeps busy
            os.setpriority(os.PRIO_PROCESS, get_native_id(), 15)
        try:
            future.set_result(work())
        except BaseException as error:  # whatever it is, the training thread must see it
            future.set_exception(error)

    # A daemon: a rank that fails must be able to end while a save is still waiting for other ranks.
    Thread(target=run, name="distcore-checkpoint", daemon=True).start()
    return future

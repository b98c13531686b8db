"""Save checkpoints during training: in the foreground, or in a thread while training continues."""

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
    """Saves checkpoints, calls ``on_checkpoint``, and removes old ones that are not the best.

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
        self._run = run
        self._hooks = hooks
        self._facts = facts
        self._files = files or Files()
        self._content = content
        self._held = held
        self._folder = Path(str(run.config.out)) / "checkpoints"
        self._pending: tuple[Future[Path], Progress] | None = None
        self._memory: dict[str, Tensor] = {}
        # The first save of a run, and of one that goes on, proves itself.
        self._proves = True
        # None: to be decided at the first save, by the memory that is left then.
        self._is_beside = None if run.config.checkpoints.asynchronous else False

    def save(
        self,
        progress: Progress,
        best: dict[str, Any] | None,
        unlogged: tuple[float, int] = (0.0, 0),
    ) -> None:
        """Commit a checkpoint; if ``checkpoints.asynchronous``, return once memory has a copy.

        ``best``: the best evaluation so far, with its ``step``. ``unlogged``: the sum of the loss
        last fails.
        """
        self.wait()
        run, hooks = self._run, self._hooks
        facts = self._facts_with(best, self._agreed_states())
        loss, items = unlogged
        if items:
            facts["unlogged"] = {"loss": loss, "items": items}
        if self._is_beside is not False:
            state = state_to_save(run, hooks)
            if self._proves:
                prove = partial(check_is_model, run, state, hooks.computed_weights)
                on_all_ranks(run, hooks, "checkpoint", prove)
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
        run, hooks = self._run, self._hooks
        final = self._folder / f"step-{progress.step:08d}"
        facts = self._facts_with(best, hooks.states())
        state = hooks.save_checkpoint(run) | (run.ema or {})
        job_state = collect_job_state(run, progress) | facts
        if not final.exists() and save_alone(run, state, final, self._files, job_state):
            log.warning("other ranks are gone: step %d is saved from memory", progress.step)

    def close(self) -> None:
        """Show others that the run is over.

        What was copied before an error is written first, if other ranks write their part, too.
        """
        if self._pending:
            future, _ = self._pending
            wait([future], None if self._run.world.size == 1 else 5.0)
        for file in self._held:
            if file:
                file.close()

    def _agreed_states(self) -> dict[str, object]:
        """Return the states of listeners; raises AgreementError if ranks differ in one."""
        states = self._hooks.states()
        if states:
            by_subject = {f"state() of {name}": state for name, state in states.items()}
            check_agreed(self._run, self._hooks, **by_subject)
        return states

    def _facts_with(self, best: dict[str, Any] | None, states: dict[str, object]) -> dict[str, Any]:
        """Return the entries of state.json that are not the job's."""
        facts = {"best": best, **self._facts}
        if self._content and self._content.known:
            facts["rows"] = self._content.known
        if states:
            facts["states"] = states
        return facts

    def check(self) -> None:
        """Raise CheckpointError if a save beside training has failed on this rank.

        If it failed elsewhere, all ranks learn it at the same step.
        """
        if not self._pending:
            return
        future, _ = self._pending
        # Not for a ConnectionError: the rank that failed says why.
        if future.done() and not isinstance(future.exception(), ConnectionError | None):
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress, if any.

        Raises CheckpointError if it failed, ConnectionError if it failed elsewhere.
        """
        if self._pending:
            future, progress = self._pending
            self._pending = None
            path = future.result()
            self._hooks.on_checkpoint(self._run, progress, path)

    def _start_background_save(
        self, blocks: list[Block], progress: Progress, facts: dict[str, Any]
    ) -> Future[Path]:
        """Start a thread that writes a copy.

        It runs no collectives, which would meet those of training: ranks meet by files.
        """
        run, hooks = self._run, self._hooks
        final = self._folder / f"step-{progress.step:08d}"
        blocks = copy_to_cpu(blocks, self._memory)
        # A copy: listeners go on with their states.
        job_state = deepcopy(collect_job_state(run, progress) | facts)
        start = partial(begin, self._files, final) if run.world.is_main else None
        on_all_ranks(run, hooks, f"checkpoint {final} could not be written", start)
        return _in_background(partial(self._write, final, blocks, job_state, self._proves))

    def _write(
        self, final: Path, blocks: list[Block], job_state: dict[str, Any], reads_back: bool = False
    ) -> Path:
        """Write this rank's part; the main rank waits for the others and commits, they for it.

        Raises CheckpointError, or ConnectionError if another rank failed.
        """
        world = self._run.world
        files = self._files

        def all_published() -> bool:
            return all(is_published(final, rank) for rank in range(world.size))

        def is_committed() -> bool:
            return final.exists() and not staging_of(final).exists()

        try:
            write_share(files, final, blocks, world.rank, reads_back=reads_back)
            if world.is_main:
                self._wait_until(all_published, final)
                commit(files, final, range(world.size), job_state)
                self._retain(job_state["best"])
            else:
                self._wait_until(is_committed, final)
        except (OSError, CheckpointError) as error:
            # Files vanish while this rank uses them where another one failed, and removes the
            # folder.
            exists = staging_of(final).exists() or final.exists()
            is_gone = isinstance(error, FileNotFoundError) or not exists
            is_elsewhere = world.size > 1 and is_gone
            discard(files, final)  # other ranks wait for it to be committed or to disappear
            kind = ConnectionError if is_elsewhere else CheckpointError
            raise kind(f"checkpoint {final} could not be written: {error}") from error
        return final

    def _wait_until(self, condition: Callable[[], bool], final: Path) -> None:
        """Wait for other ranks; raises CheckpointError if they fail, or take too long."""
        timeout = self._run.config.timeout
        deadline = time.monotonic() + timeout
        while not condition():
            if not staging_of(final).exists() and not final.exists():
                raise CheckpointError("another rank could not write its part")
            if time.monotonic() > deadline:
                raise CheckpointError(f"other ranks did not finish writing within {timeout} s")
            time.sleep(POLL)

    def _retain(self, best: dict[str, Any] | None) -> None:
        if self._run.world.is_main:
            best_step = best["step"] if best else None
            keep_last = self._run.config.checkpoints.keep_last
            retain(self._folder, keep_last, best_step, self._files)


def have_room(run: Run, hooks: Hooks, blocks: list[Block]) -> bool:
    """Return True if each machine has memory for a copy of all its ranks' blocks, twice over."""
    ranks_of_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = sum(block.values.nbytes for block in blocks) * ranks_of_machine
    has_room = needed < psutil.virtual_memory().available / 2
    mine = torch.tensor([has_room], device=run.world.device)
    is_enough = bool(hooks.gather_outputs(run, {"room": mine})["room"].all())
    if not is_enough:
        log.info("training waits while checkpoints are written, as there is no memory for a copy")
    return is_enough


def _in_background(work: Callable[[], Path]) -> Future[Path]:
    """Return the future result of ``work``, which a thread with a low priority does."""
    future: Future[Path] = Future()

    def run() -> None:
        if sys.platform == "linux":  # elsewhere threads have no niceness of their own
            # At 15 the thread gets a thirtieth of a core that training keeps busy.
            os.setpriority(os.PRIO_PROCESS, get_native_id(), 15)
        try:
            future.set_result(work())
        except BaseException as error:  # whatever it is, the training thread must see it
            future.set_exception(error)

    # A daemon: a rank that fails must be able to end while a save is still waiting for other ranks.
    Thread(target=run, name="distcore-checkpoint", daemon=True).start()
    return future

"""Notice that a rank is stuck, ask all ranks where they are, and name the one that is missing."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from distcore import (
    ConfigError,
    MicroBatch,
    Progress,
    RankInfo,
    Run,
    RunConfig,
    Sampler,
    StepResult,
    World,
    hookimpl,
)
from distcore.lab import what_is_saved
from distcore_workbench.watchdog.ending import Ending
from distcore_workbench.watchdog.watch import FIRST, Signs, Watch

FOLDER = "hangs"


@dataclass
class Watchdog:
    """A thread that inspects the stack of the rank's main thread from time to time; it
    adds no cost to hooks.

    Where a hook, or the passes of a step, takes longer than ``limit``, ranks tell each other where
    they are: hook, step, line of code, and number, name and shape of their last collective. They do
    so by the store of their launcher or of rank 0, not by the process group. One line names the
    rank that is missing and what it does instead, and ``hangs/`` in the run folder gets the stacks
    of each rank. Without a store, as of ``horovod`` under MPI or Slurm, each rank tells of itself,
    as a single rank does.

    A run whose hang was named ends within 15 s of SIGTERM or the first Ctrl-C: the missing rank is
    ended, and the others save what they hold, as they do where a rank is killed.
    """

    limit: float | Literal["auto"] = FIRST
    """Seconds that a hook, or the forward and backward passes of one step, may take; 0: off; auto:
    10 times the longest so far, at least 60, and 120 in the first steps.
    """

    end: bool = False
    """Whether a hang that was named ends the run as a failure, with exit status
    3: ``--max-restarts`` then applies.
    """

    def __post_init__(self) -> None:
        if self.limit != "auto" and not self.limit >= 0:  # nor NaN
            raise ConfigError(
                f"extensions.watchdog.limit = {self.limit}: must be 0, which is off, or above"
            )
        if self.end and not self.limit:
            raise ConfigError(
                "extensions.watchdog.end: needs a limit above 0, after which a hang is named"
            )
        self._over = threading.Event()
        self._signs = Signs()
        self._watch: Watch | None = None

    @hookimpl(wrapper=True, tryfirst=True)
    def setup(self, config: RunConfig, rank_info: RankInfo) -> Generator[None, World, World]:
        """Start the watching thread, which connects to those of other ranks
        once all have joined.
        """
        folder, thread = Path(str(config.out), FOLDER), threading.get_ident()
        ending = Ending(rank_info, self.end, partial(what_is_saved, config))
        watch = self._watch = Watch(self.limit, self._signs, rank_info, folder, thread, ending)
        if self.limit:
            watch.stops.listen()
            threading.Thread(
                target=watch.run, args=(self._over,), name="distcore-watchdog", daemon=True
            ).start()
        world = yield
        # in a thread of its own: a store may be slow, and training need not wait for it
        if self.limit:
            threading.Thread(
                target=watch.connect, name="distcore-watchdog-connect", daemon=True
            ).start()
        return world

    @hookimpl
    def on_run_start(self, progress: Progress) -> None:
        """Remember the step before the first."""
        self._signs.step = self._signs.start = progress.step

    @hookimpl(wrapper=True)
    def build_sampler(self) -> Generator[None, Sampler, Sampler]:
        """Have the batches that are asked for counted: the only signs of
        progress in an evaluation.
        """
        return _Counting((yield), self._signs)

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress, result: StepResult) -> None:
        """Remember the step; takes every argument, because that call is the fastest."""
        self._signs.step = progress.step

    @hookimpl(wrapper=True)
    def teardown(self) -> Generator[None, bool, bool]:
        """Stop the watching thread."""
        answer = yield
        self._over.set()
        if self._watch is not None:
            self._watch.stops.close()
        return answer


class _Counting:
    """A sampler that counts the steps that it is asked for."""

    def __init__(self, sampler: Sampler, signs: Signs) -> None:
        self._sampler, self._signs = sampler, signs

    def __call__(self, epoch: int, step: int) -> Sequence[MicroBatch]:
        self._signs.batches += 1
        return self._sampler(epoch, step)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._sampler,)  # a process that loads data is not watched


def _same(sampler: Sampler) -> Sampler:
    return sampler

"""Log where a rank is stuck when a hook takes too long: rank, hook, step and rows."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Generator
from dataclasses import dataclass
from types import CodeType, FrameType

from distcore import MicroBatch, Progress, RankInfo, Run, StepResult, World, hookimpl
from distcore.jobs import Hooks, forward_all, train_step, where

log = logging.getLogger("distcore")
CHECKS_PER_LIMIT = 8
"""How often the watchdog looks at the rank in ``limit`` seconds: an alarm is late by at most ``limit / 8`` seconds."""
_LIKELY = "; likely another rank, its machine or the link to it does not answer: the run ends after config key timeout"
ROWS_SHOWN = 8
"""Row numbers in a message."""


@dataclass
class Watchdog:
    """A thread that inspects the stack of the rank's main thread from time to time; it adds no cost to hooks."""

    limit: float = 120.0
    """Seconds that a hook, or the forward and backward passes of one step, may take; 0: off."""

    def __post_init__(self) -> None:
        self._likely = ""
        self._over = threading.Event()
        self._step = 0
        self._rank = "0"

    @hookimpl(wrapper=True, tryfirst=True)
    def setup(self, rank_info: RankInfo) -> Generator[None, World, World]:
        """Start the watching thread."""
        machine = where(rank_info)
        self._rank = f"{rank_info.rank} on {machine}" if machine else str(rank_info.rank)
        self._likely = _LIKELY if machine else ""
        if self.limit > 0:
            watched = threading.get_ident()
            threading.Thread(target=self._watch, args=(watched,), name="distcore-watchdog", daemon=True).start()
        return (yield)

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress, result: StepResult) -> None:
        """Remember the step, for the message; takes every argument, because that call is the fastest."""
        self._step = progress.step

    @hookimpl(wrapper=True)
    def teardown(self) -> Generator[None, bool, bool]:
        """Stop the watching thread."""
        answer = yield
        self._over.set()
        return answer

    def _watch(self, thread: int) -> None:
        """Raise one alarm for each call that is still running after ``limit`` seconds."""
        before: tuple[int, CodeType] | None = None
        checks = 0  # in a row that found the same call
        while not self._over.wait(self.limit / CHECKS_PER_LIMIT):
            stuck = _hook_or_pass(sys._current_frames().get(thread))
            # Remember the call by id and code: a frame kept here would keep the run's tensors alive.
            call = (id(stuck), stuck.f_code) if stuck is not None else None
            checks = checks + 1 if call is not None and call == before else 0
            before = call
            if checks == CHECKS_PER_LIMIT and stuck is not None:
                log.error(self._describe(stuck))
            del stuck

    def _describe(self, frame: FrameType) -> str:
        name = frame.f_code.co_name
        what = f"hook {name}()" if frame.f_code in _HOOKS else f"{name}()"
        rows = _rows(frame)
        shown = ", ".join(map(str, rows[:ROWS_SHOWN])) + (", …" if len(rows) > ROWS_SHOWN else "")
        of_rows = f" on rows {shown}" if rows else ""
        since = f"for {self.limit:g} s, in step {self._step + 1}"
        return f"watchdog: rank {self._rank} has been in {what} {since}{of_rows}{self._likely}"


_HOOKS = {method.__code__ for name, method in vars(Hooks).items() if callable(method) and not name.startswith("_")}
# ``forward_all`` may be decorated; its frames have the code of the function inside.
_PASSES = {train_step.__code__, getattr(forward_all, "__wrapped__", forward_all).__code__}


def _hook_or_pass(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a hook, or of the function that runs forward and backward passes."""
    while frame is not None and frame.f_code not in _HOOKS and frame.f_code not in _PASSES:
        frame = frame.f_back
    return frame


def _rows(frame: FrameType | None) -> list[int]:
    """Return the rows of the micro-batch in work, or of the whole step where a strategy runs its passes itself."""
    while frame is not None and frame.f_code not in _PASSES and frame.f_code is not Hooks.train_step.__code__:
        frame = frame.f_back
    if frame is None:
        return []
    if isinstance(micro := frame.f_locals.get("micro"), MicroBatch):
        return [int(row) for row in micro.indices]
    return [int(row) for micro, _ in frame.f_locals.get("micros", ()) for row in micro.indices]

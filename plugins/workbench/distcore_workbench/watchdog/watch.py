"""The thread of the watchdog: how long a rank has stood still, its alarm, and its answers to
the alarms of others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from distcore import RankInfo
from distcore.rank_environment import where
from distcore_workbench.watchdog.channel import (
    Channel,
    EndOrder,
    SilentStoreError,
    is_of_launcher,
    open_channel,
)
from distcore_workbench.watchdog.ending import Ending
from distcore_workbench.watchdog.situation import (
    EVALUATES,
    RankState,
    capture_state,
    frame_of,
    name_of,
    rows_of,
    stuck_in,
    write_stacks,
)
from distcore_workbench.watchdog.stop_signals import StopSignals
from distcore_workbench.watchdog.verdict import Verdict, verdict

log = logging.getLogger("distcore")
CHECKS_PER_LIMIT = 8
"""How often the watchdog looks at the rank in ``limit`` seconds: an alarm is late by at most
``limit / 8`` seconds.
"""
PAUSE, MANY = 1.0, 1000
"""Most seconds between two looks where ranks ask each other, for up to ``MANY`` ranks.

With more ranks it is longer in proportion.
"""
FIRST, FLOOR, FACTOR, FEW = 120.0, 60.0, 10, 3
"""The limit ``auto``: in the first steps, at least, as a multiple of the longest stay, and how
many the first are.
"""
ROWS_SHOWN = 8
"""Row numbers in a message."""
_LIKELY = (
    "; likely another rank, its machine or the link to it does not answer: the run ends after --set"
    " timeout=SECONDS"
)


@dataclass
class Signs:
    """Signs of progress, which the run's own thread leaves."""

    step: int = 0
    """Optimizer steps done."""
    start: int = 0
    """Those before this attempt."""
    batches: int = 0
    """Steps of training and evaluation whose rows were asked for."""


class Watch:
    """Looks at the thread of the run."""

    def __init__(
        self,
        limit: float | Literal["auto"],
        signs: Signs,
        rank_info: RankInfo,
        folder: Path,
        thread: int,
        ending: Ending | None = None,
    ) -> None:
        """``folder`` is for stacks, ``thread`` the run's; ``ending`` ends a hang that was named."""
        self._limit, self._signs, self._info, self._folder, self._thread = (
            limit,
            signs,
            rank_info,
            folder,
            thread,
        )
        self._channel: Channel | None = None
        self._mark: object = None
        self._since = time.monotonic()
        self._longest = 0.0
        self._is_told = self._has_lost = False
        self.stops = StopSignals()
        """Signals that ask this process to stop."""
        self._ending = ending or Ending(rank_info)
        self._named: Verdict | None = None  # by this rank, which has not moved since
        self._has_told_stop = False

    def connect(self) -> None:
        """Connect to the watchdogs of the other ranks, once all have joined."""
        self._channel = open_channel(self._info)

    def run(self, over: threading.Event) -> None:
        """Look until the run is over."""
        last = time.monotonic()
        while not over.wait(pause := self._pause()):
            now = time.monotonic()
            late = now - last - pause
            if late > max(1.0, pause):  # this process was stopped, and so was the thread of the run
                self._since += late
            last = now
            self._note(now)
            try:
                self._answer()
                self._raise_alarm()
                self._end_hang()
            except SilentStoreError:
                self._lose()
            last += time.monotonic() - now  # answers take time
        self._disconnect()

    def _note(self, now: float) -> None:
        """Compare the place of the run with that of the last look."""
        stuck = stuck_in(frame_of(self._thread))
        code = stuck.f_code if stuck else None
        # The frame by its id: one that is kept here would keep the run's tensors alive.
        mark = (self._signs.step, self._signs.batches, id(stuck), code)
        if mark == self._mark:
            return
        # The first step is longer: it starts much that later ones find.
        if self._signs.step > self._signs.start + 1:
            self._longest = max(self._longest, now - self._since)
        self._mark = mark
        self._since = now
        self._is_told = False
        self._named = None

    def _limit_now(self) -> float:
        if self._limit != "auto":
            return self._limit
        has_learned = self._signs.step >= self._signs.start + FEW
        return max(FLOOR, FACTOR * self._longest) if has_learned else FIRST

    def _pause(self) -> float:
        pause = self._limit_now() / CHECKS_PER_LIMIT
        is_short = self._info.size > 1 or self._named is not None
        return min(pause, PAUSE * max(1.0, self._info.size / MANY)) if is_short else pause

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _lose(self) -> None:
        self._disconnect()
        self._has_lost = True

    def _answer(self) -> None:
        """Answer the alarm of another rank, or obey its order to end, if there is a new one."""
        if self._channel is None or (number := self._channel.heard()) is None:
            return
        if order := self._channel.end_order(number):
            self._ending.obey(order)
            return
        self._is_told = True
        self._channel.answer(number, self._look())

    def _end_hang(self) -> None:
        """End the hang that this rank has named, if a signal has asked a rank to stop, or if
        hangs end the run.

        A rank that was asked to stop passes that on: the one that has named the hang may not have
        been asked.
        """
        self._ending.check()
        is_asked, channel = self.stops.is_asked(), self._channel
        if is_asked and channel is not None and not self._has_told_stop:
            channel.tell_stop()
            self._has_told_stop = True
        if (named := self._named) is None or self._ending.has_begun:
            return
        is_stop = is_asked or (channel is not None and channel.is_stopping())
        order = EndOrder(named.ranks, named.line, is_stop)
        if not (is_stop or self._ending.is_failure) or (
            channel is not None and not channel.tell_end(order)
        ):
            return
        ranks = ", ".join(map(str, named.ranks))
        log.error(
            "%s",
            f"watchdog: ends {'rank' if len(named.ranks) == 1 else 'ranks'} {ranks}, which hangs",
        )
        if channel is not None:
            self._ending.kill_silent(named.silent, channel.process_of, named.line)
        self._ending.obey(order)

    def _look(self) -> RankState:
        """Return the place of this rank, and add its stacks to the run folder."""
        waited = time.monotonic() - self._since
        state = capture_state(self._thread, self._info.rank, self._signs.step + 1, waited)
        # In a thread: the disk of the run folder may be what does not answer.
        writer = threading.Thread(
            target=self._write, args=(state,), name="distcore-watchdog-stacks", daemon=True
        )
        writer.start()
        return state

    def _write(self, here: RankState) -> None:
        with contextlib.suppress(OSError):
            write_stacks(self._folder / f"rank-{self._info.rank}.txt", here, self._thread)

    def _raise_alarm(self) -> None:
        """Log once if this rank has been in one hook, or pass over rows, beyond the limit."""
        stuck = stuck_in(frame_of(self._thread))
        waited = time.monotonic() - self._since
        if stuck is None or self._is_told or waited < self._limit_now():
            return
        # Perhaps this process was stopped, and not the store.
        if self._has_lost and self._channel is None:
            self.connect()
        try:
            self._is_told = self._channel is None or self._name_the_missing(self._channel, stuck)
        except SilentStoreError:
            self._lose()
            self._is_told = True
        evaluates = stuck.f_code is EVALUATES
        is_at_work = evaluates and capture_state(self._thread, 0, 0, 0.0).is_progressing
        if self._channel is None and not is_at_work:
            self._name_itself(stuck)

    def _name_the_missing(self, channel: Channel, stuck: FrameType) -> bool:
        """Ask all ranks where they are, and name the one that is missing.

        Returns False if another rank asks already, or this one went on in the meantime.
        """
        number, mark = channel.ask(), self._mark
        if number is None:
            return False
        here = self._look()
        ranks = {here.rank: here, **channel.answers(number, self._pause())}
        self._note(time.monotonic())
        # ranks did not answer at the same moment, so nothing follows from what they said
        if self._mark != mark:
            return False
        silent = set(range(self._info.size)) - ranks.keys()
        judged = verdict(dict(sorted(ranks.items())), silent, channel.process_of)
        if judged.line:
            log.error("%s", f"watchdog: {judged.line}; stacks in {self._folder}")
            self._named = judged
        elif not all(one.is_progressing for one in ranks.values()):
            self._name_itself(stuck)
        return True

    def _name_itself(self, stuck: FrameType) -> None:
        """Say where this rank is, where no other one can be named."""
        line = self._alone(stuck)
        log.error("%s", f"watchdog: {line}")
        self._named = Verdict(line, (self._info.rank,))

    def _alone(self, stuck: FrameType) -> str:
        """Return the line of a rank that cannot ask the others."""
        machine = where(self._info)
        rows = rows_of(stuck)
        rank = f"{self._info.rank} on {machine}" if machine else str(self._info.rank)
        shown_rows = ", ".join(map(str, rows[:ROWS_SHOWN]))
        if len(rows) > ROWS_SHOWN:
            shown_rows += ", …"
        of_rows = f" on rows {shown_rows}" if rows else ""
        since = f"for {self._limit_now():g} s, in step {self._signs.step + 1}"
        likely = _LIKELY if machine else ""
        if self._has_lost and self._channel is None and not is_of_launcher():
            likely = (
                "; rank 0 does not answer: it holds the store of the ranks, which does not answer"
                " either"
            )
        return f"rank {rank} has been in {name_of(stuck)} {since}{of_rows}{likely}"

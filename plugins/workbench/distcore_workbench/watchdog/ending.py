"""The end of a hang that was named: missing ranks end, so that the others notice it and
save what they hold.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable

from distcore import RankError, RankInfo
from distcore.launchers.processes import exit_now, record_killed
from distcore.rank_environment import join
from distcore_workbench.watchdog.channel import EndOrder

STOP, FAILURE = 10.0, 60.0
"""Seconds that ranks have to save what they hold: after a signal, and where the
hang is a failure.
"""
HEARD = 2.0
"""Seconds after which all ranks have heard an order: one that ends may take the store with it."""


class Ending:
    """Ends this rank, or gives it time to save: its own thread notices that a peer is gone."""

    def __init__(
        self,
        rank_info: RankInfo,
        is_failure: bool = False,
        saved: Callable[[], str] = lambda: "nothing was saved",
    ) -> None:
        """``is_failure``: whether each hang ends the run; ``saved`` returns what is
        saved, for the user.
        """
        self._info, self._saved = rank_info, saved
        self.is_failure = is_failure
        """Whether a hang that was named ends the run without being asked to."""
        self._deadline = float("inf")
        self._order: EndOrder | None = None

    @property
    def has_begun(self) -> bool:
        """Whether this rank has been told to end."""
        return self._order is not None

    def obey(self, order: EndOrder) -> None:
        """End this rank if it is one of those that the others wait for, else begin to wait
        for its own end.
        """
        self._order = order
        self._deadline = time.monotonic() + (STOP if order.is_stop else FAILURE)
        if self._info.rank in order.ranks:
            if self._info.size > 1:
                time.sleep(HEARD)
            record_killed(self._info.rank, order.line)
            self._exit(order)

    def check(self) -> None:
        """End this rank if its time is over."""
        if self._order is not None and time.monotonic() > self._deadline:
            self._exit(self._order)

    def kill_silent(
        self, ranks: Iterable[int], process_of: Callable[[int], str], line: str
    ) -> None:
        """Kill those of ``ranks`` whose processes are on this machine: they
        cannot hear an order.
        """
        for rank in ranks:
            machine, _, number = process_of(rank).partition(" ")
            if machine == socket.gethostname():
                record_killed(rank, line)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(number), signal.SIGKILL)

    def _exit(self, order: EndOrder) -> None:
        if join(os.environ) is None:  # no launcher speaks for this process
            text = f"stopped; {self._saved()}" if order.is_stop else f"error: {order.line}"
            print(text, file=sys.stderr)
        exit_now(128 + signal.SIGTERM if order.is_stop else RankError.exit_code)

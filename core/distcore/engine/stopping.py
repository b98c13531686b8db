"""Stopping on SIGTERM, which may reach only one rank, or Ctrl-C: at the next log line all ranks agree to stop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from distcore.launchers.processes.contexts import stop_signals
from distcore.plugin.strategy.contract import RankInfo
from distcore.rank_environment import join


class StopRequest:
    """Whether this process was asked to stop."""

    requested = False

    def ask(self) -> None:
        """Ask it to stop."""
        self.requested = True


@contextmanager
def on_stop_signal() -> Iterator[StopRequest]:
    """Yield a request that SIGTERM sets, without ending the process; restore the handler afterwards.

    The first Ctrl-C sets it too, but not in ranks, whose launcher gets it as well: ours then sends SIGTERM, another
    may do otherwise. Outside the main thread, where no handler can be set, the request stays unset.
    """
    request = StopRequest()
    launcher = (join(os.environ) or RankInfo()).launcher
    with stop_signals(request.ask, ctrl_c=launcher == "local"):  # ranks of our launcher ignore Ctrl-C
        yield request

"""Stop on SIGTERM or Ctrl-C. The signal may reach one rank only; all ranks agree to stop at the next log line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

from distcore.launchers.processes.contexts import handle_stop_signals
from distcore.plugin.strategy.contract import RankInfo
from distcore.rank_environment import join


@contextmanager
def catch_stop_signals() -> Iterator[Event]:
    """Yield an event that SIGTERM sets, instead of ending the process; restore the handler afterward.

    The first Ctrl-C sets it, too, but not in ranks: their launcher gets Ctrl-C as well, and distcore's then
    sends SIGTERM. Outside the main thread no handler can be set, and the event stays unset.
    """
    requested = Event()
    launcher = (join(os.environ) or RankInfo()).launcher
    with handle_stop_signals(requested.set, ctrl_c=launcher == "local"):  # ranks of our launcher ignore Ctrl-C
        yield requested

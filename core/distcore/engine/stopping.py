"""Stop on SIGTERM or Ctrl-C. The signal may reach one rank only; all ranks agree to stop at the next log line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from distcore.launchers.processes.contexts import handle_stop_signals
from distcore.plugin.strategy.contract import RankInfo
from distcore.rank_environment import join


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """Yield the signals so far, to which SIGTERM is added instead of ending the process.

    The first Ctrl-C is added, too, but not in ranks: their launcher gets Ctrl-C as well, and distcore's then
    sends SIGTERM. Outside the main thread no handler can be set, and the list stays empty.
    """
    received: list[int] = []
    launcher = (join(os.environ) or RankInfo()).launcher
    with handle_stop_signals(received.append, ctrl_c=launcher == "local"):  # ranks of our launcher ignore Ctrl-C
        yield received

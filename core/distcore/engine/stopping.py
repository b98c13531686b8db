"""Stop on SIGTERM or Ctrl-C. The signal may reach one rank only, so all ranks agree to stop, and when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from distcore.launchers.processes.contexts import handle_stop_signals
from distcore.rank_environment import join


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """Yield the signals so far, to which SIGTERM is added instead of ending the process.

    The first Ctrl-C is added, too, but not in ranks: their launcher gets Ctrl-C as well, and distcore's then
    sends SIGTERM. Outside the main thread no handler can be set, and the list stays empty.
    """
    received: list[int] = []
    rank = join(os.environ)
    is_ours = rank is None or rank.launcher == "local"  # ranks of our launcher ignore Ctrl-C, and it speaks for them
    says_so = rank is None or not (is_ours or rank.rank)
    with handle_stop_signals(received.append, is_ours, says_so):
        yield received

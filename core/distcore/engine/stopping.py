"""Stopping on SIGTERM, which may reach only one rank: at the next log line all ranks agree to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether this process has received SIGTERM."""

    requested = False


@contextmanager
def on_sigterm() -> Iterator[StopRequest]:
    """Yield a request that SIGTERM sets, without ending the process; restore the handler afterwards.

    Outside the main thread, where no handler can be set, it stays unset.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        request.requested = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)

"""Being told to stop: SIGTERM reaches one rank or all; they agree on the step at the next log line, where they meet."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether this process has been told to stop."""

    asked = False


@contextmanager
def on_sigterm() -> Iterator[StopRequest]:
    """Turn SIGTERM, however often it comes, into a request; outside the main thread, where none arrives, into none."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        request.asked = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)

"""Signals that ask a run to stop, as another thread sees them while the main
thread executes no Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from typing import ClassVar

ASK_TO_STOP = {
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
}


class StopSignals:
    """Hears signals through the interpreter's wakeup descriptor.

    A handler in Python runs in the main thread, between two of its instructions. A thread that
    waits in a collective, or in any other call of C, has none for as long as that takes.
    """

    _latest: ClassVar[StopSignals | None] = None

    def __init__(self) -> None:
        self._read = self._write = -1
        self._is_asked = False

    def listen(self) -> None:
        """Begin; in vain outside of the main thread, and where the program, such as an
        event loop, listens itself.
        """
        if (
            StopSignals._latest is not None
            and threading.current_thread() is threading.main_thread()
        ):
            # of a run in this process that failed, which nobody tears down
            StopSignals._latest.close()
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        try:
            before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        except ValueError:  # not in the main thread
            before = read
        if before != -1:
            if before != read:
                signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._read, self._write = read, write
        StopSignals._latest = self
        close = weakref.WeakMethod(self.close)
        # A forked process would write its own signals into the pipe of this one.
        os.register_at_fork(after_in_child=lambda: (method := close()) and method())

    def is_asked(self) -> bool:
        """Return True if a signal has asked this process to stop."""
        if self._read != -1:
            with contextlib.suppress(BlockingIOError, OSError):
                self._is_asked = self._is_asked or not ASK_TO_STOP.isdisjoint(
                    os.read(self._read, 4096)
                )
        return self._is_asked

    def close(self) -> None:
        """End."""
        if self._read == -1:
            return
        with contextlib.suppress(ValueError):  # not in the main thread
            if (other := signal.set_wakeup_fd(-1)) != self._write:
                signal.set_wakeup_fd(other)
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1

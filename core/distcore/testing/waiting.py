"""Waiting for what other ranks do."""

from __future__ import annotations

import time
from collections.abc import Callable


def await_true(condition: Callable[[], bool], seconds: float, failure: str) -> None:
    """Wait until ``condition()`` is true. Raises TimeoutError with the message ``failure`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(failure)
        time.sleep(0.002)

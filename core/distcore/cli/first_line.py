"""Each command prints a line about itself within two seconds, also where imports are slow."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SILENCE = 1.0
"""Seconds after which a command says that it is at work. An import may hold the interpreter
for as long again.
"""


@contextmanager
def first_line(command: str) -> Iterator[None]:
    """While the block runs, have the main rank soon print a line about ``command``."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    line = f"distcore {command}: starting"
    to_stderr = {"file": sys.stderr, "flush": True}
    timer = threading.Timer(SILENCE, print, (line,), to_stderr)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

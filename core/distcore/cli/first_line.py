"""Each command prints a line about itself within two seconds, also where imports are slow."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SILENCE = 1.5
"""Seconds without output after which a command says that it is at work."""


class FirstLine:
    """Prints one line about a command: before torch is imported, or after ``SILENCE``. A finder of modules."""

    def __init__(self, command: str) -> None:
        self.command, self.is_said = command, False
        self.timer = threading.Timer(SILENCE, self.say, ("starting",))
        self.timer.daemon = True

    def find_spec(self, name: str, *_: object) -> None:
        """Find nothing, but notice each import."""
        if name == "torch":  # takes longer, and meanwhile no other thread runs
            self.say("loading PyTorch")

    def say(self, what: str) -> None:
        """Print that the command does ``what``, unless it has printed already."""
        if not self.is_said:
            self.is_said = True
            print(f"distcore {self.command}: {what}", file=sys.stderr, flush=True)


@contextmanager
def first_line(command: str) -> Iterator[None]:
    """While the block runs, have the main rank soon print a line about ``command``."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    line = FirstLine(command)
    sys.meta_path.insert(0, line)
    line.timer.start()
    try:
        yield
    finally:
        line.timer.cancel()
        sys.meta_path.remove(line)

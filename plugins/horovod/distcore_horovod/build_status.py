"""The percentages of make: one line that is rewritten on a terminal, one line per ten percent elsewhere."""

from __future__ import annotations

import re
import sys
import time
from typing import Self

PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")


class BuildStatus:
    """Read the output of a build, and print on stderr how far it is."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.live = sys.stderr.isatty()
        self.shown = -1
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        self._say("started; it takes some minutes")
        return self

    def read(self, line: str) -> None:
        """Take in one line of the build's output."""
        match = PERCENT.match(line)
        percent = int(match[1]) if match else self.shown
        if percent > self.shown and (self.live or percent // 10 > self.shown // 10):
            self.shown = percent
            self._say(f"{percent:3d} %")

    def __exit__(self, *raised: object) -> None:
        if self.live:
            print(file=sys.stderr)

    def _say(self, what: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        line = f"{self.title}: {what} ({minutes}:{seconds:02d})"
        print(f"\r{line:<79}" if self.live else line, end="" if self.live else "\n", file=sys.stderr, flush=True)

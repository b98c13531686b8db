"""How far a build is, by the percentages of make: one live line on a terminal, a line every tenth elsewhere."""

from __future__ import annotations

import re
import sys
import time
from typing import Self

PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")


class Progress:
    """Reads the lines of a build and says on stderr how far it is."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.live = sys.stderr.isatty()
        self.said = -1
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        self._say("started; it takes some minutes")
        return self

    def read(self, line: str) -> None:
        """Take in one line of the build's output."""
        match = PERCENT.match(line)
        percent = int(match[1]) if match else self.said
        if percent > self.said and (self.live or percent // 10 > self.said // 10):
            self.said = percent
            self._say(f"{percent:3d} %")

    def __exit__(self, *raised: object) -> None:
        if self.live:
            print(file=sys.stderr)

    def _say(self, what: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        line = f"{self.title}: {what} ({minutes}:{seconds:02d})"
        print(f"\r{line:<79}" if self.live else line, end="" if self.live else "\n", file=sys.stderr, flush=True)

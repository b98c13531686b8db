"""Progress of a build, read from make's percentages: one live line on a terminal, a line
per 10 % elsewhere.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Self

PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")


class BuildStatus:
    """Read the output of a build line by line, and print its progress to stderr."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.live = sys.stderr.isatty()
        self.percent = -1
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        self._print("started; it takes some minutes")
        return self

    def read(self, line: str) -> None:
        """Process one line of the build's output."""
        match = PERCENT.match(line)
        percent = int(match[1]) if match else self.percent
        if percent > self.percent and (self.live or percent // 10 > self.percent // 10):
            self.percent = percent
            self._print(f"{percent:3d} %")

    def __exit__(self, *raised: object) -> None:
        if self.live:
            print(file=sys.stderr)

    def _print(self, what: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        line = f"{self.title}: {what} ({minutes}:{seconds:02d})"
        print(
            f"\r{line:<79}" if self.live else line,
            end="" if self.live else "\n",
            file=sys.stderr,
            flush=True,
        )

"""A live line below the cell of a notebook, which shows a carriage return as a terminal does and knows no cursor."""

from __future__ import annotations

import sys


def in_notebook() -> bool:
    """Return True if stderr goes to the cell of a notebook, also from a rank that was forked there."""
    return type(sys.stderr).__module__.startswith("ipykernel.")


class NotebookLine:
    """One line on stderr that each update overwrites."""

    def __init__(self) -> None:
        self._length = 0

    def update(self, text: str) -> None:
        """Replace the line by ``text``."""
        print(f"\r{text.ljust(self._length)}", end="", file=sys.stderr, flush=True)
        self._length = len(text)

    def say(self, text: str) -> None:
        """Show ``text`` permanently; the next output is below it."""
        self.update(text)
        self.end()

    def end(self) -> None:
        """Leave the line as it is, and end."""
        if self._length:
            print(file=sys.stderr, flush=True)
        self._length = 0

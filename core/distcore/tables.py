"""Plain tables on the screen, and in a file that stdout was sent to."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def plain_table() -> Table:
    """A table without lines: bold headings, two columns of space between cells."""
    return Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))


def console_for(width_of_a_file: int) -> Console:
    """The console of stdout, as wide as the terminal, or ``width_of_a_file`` columns where stdout is none."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=width_of_a_file)

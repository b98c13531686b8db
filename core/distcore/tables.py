"""Plain tables for stdout, whether it is a terminal or a file."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def plain_table() -> Table:
    """Return a table without rules: bold headings, two spaces between columns."""
    return Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))


def headed_table(*headings: str) -> Table:
    """Return a plain table with these columns, whose long cells go on in the next line."""
    table = plain_table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def stdout_console(file_width: int) -> Console:
    """Return a console on stdout: as wide as the terminal, or ``file_width`` characters where stdout is none."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=file_width)

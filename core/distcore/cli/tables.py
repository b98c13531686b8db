"""Plain tables for stdout, a terminal or a file. No line breaks inside a word."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

Cell = str | Text
"""Plain text, which is no markup, or text with a style."""
FILE_WIDTH = 120
"""Characters per line where stdout is not a terminal and COLUMNS does not say how wide it is."""
GAP = 2
"""Spaces between two columns."""
PROSE = 30
"""Smallest width of a column of prose, if the words of the other columns leave as much."""


class _Screen(Console):
    """A console that passes a broken pipe on to the command line, which then ends
    as other programs do.
    """

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled, where rich would exit with 1."""
        raise


def stdout_console(file_width: int = FILE_WIDTH) -> Console:
    """Return a console on stdout: as wide as the terminal or as COLUMNS
    says, else ``file_width`` characters.
    """
    screen = _Screen(highlight=False)
    known = screen.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return screen if known else _Screen(highlight=False, width=file_width)


def say(console: Console, line: str) -> None:
    """Print a line of prose: wrapped between words on a terminal, whole in a file,
    where programs read lines.
    """
    console.print(Text(line), soft_wrap=not console.is_terminal)


def print_cells(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[Cell]], numbers: bool = False
) -> None:
    """Print a table of short cells. Columns that do not fit continue below, after a copy
    of the first column.

    ``numbers``: all columns but the first are aligned on the right.
    """
    columns = zip(headings, *rows, strict=True)
    widths = [max(map(_width, column)) for column in columns]
    for number, indices in enumerate(_blocks(widths, console.width)):
        table = _plain_table()
        for index in indices:
            is_first = index == 0
            align: JustifyMethod = "right" if numbers and not is_first else "left"
            # Only the first column may be narrowed: without a width rich fits it into the line.
            width = None if is_first else widths[index]
            table.add_column(_text(headings[index]), justify=align, overflow="fold", width=width)
        for row in rows:
            table.add_row(*(_text(row[index]) for index in indices))
        if number:
            console.print()
        console.print(table)


def print_described(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[Cell]]
) -> None:
    """Print a table whose last column is prose, wrapped to the width that
    the other columns leave.
    """
    *names, _ = zip(headings, *rows, strict=True)
    widths = _narrowed(names, console.width - PROSE - GAP * len(names))
    table = _plain_table()
    for heading, width in zip(headings, [*widths, None], strict=True):
        table.add_column(_text(heading), width=width, overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)


def _plain_table() -> Table:
    """Return an empty table without lines between its cells."""
    padding = (0, GAP, 0, 0)  # above, right, below, left
    return Table(box=None, header_style="bold", pad_edge=False, padding=padding)


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _width(cell: Cell) -> int:
    return cell_len(_text(cell).plain)


def _blocks(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yield the columns of each table below the other, by index; all begin with the first column.

    Each has one more column, at least, even if that does not fit.
    """
    block = [0]
    width_of_block = widths[0]
    for index, width in enumerate(widths[1:], 1):
        if len(block) > 1 and width_of_block + GAP + width > room:
            yield block
            block = [0]
            width_of_block = widths[0]
        block.append(index)
        width_of_block += GAP + width
    yield block


def _narrowed(columns: Sequence[Sequence[Cell]], room: int) -> list[int]:
    """Return a width for each column, together at most ``room`` if their longest words allow it.

    The column that has most beyond its longest word gives up most.
    """
    widths = [max(map(_width, column)) for column in columns]
    spare = [width - _longest_word(column) for width, column in zip(widths, columns, strict=True)]
    for index in sorted(range(len(widths)), key=lambda index: -spare[index]):
        excess = max(0, sum(widths) - room)
        widths[index] -= min(excess, spare[index])
    return widths


def _longest_word(column: Sequence[Cell]) -> int:
    """Return the width of the longest word in a column, 0 for one without words."""
    words: list[str] = []
    for cell in column:
        words += _text(cell).plain.split()
    return max(map(cell_len, words), default=0)

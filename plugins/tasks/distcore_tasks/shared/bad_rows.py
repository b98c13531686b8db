"""The list of the rows that were passed over, in the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

BAD_ROWS = "bad_rows.txt"
"""File of a run folder with the rows that were passed over."""


def bad_rows_warnings(lines: Sequence[str]) -> list[str]:
    """Return a warning with the number and the first of the rows that were passed
    over; none without them.
    """
    what = (
        "1 bad row is passed over" if len(lines) == 1 else f"{len(lines)} bad rows are passed over"
    )
    return (
        [f"{what}, the first is {lines[0]}; {BAD_ROWS} of the run folder lists them"]
        if lines
        else []
    )


def write_bad_rows(folder: Path, lines: Sequence[str]) -> None:
    """Write the list, if any row was passed over."""
    if lines:
        (folder / BAD_ROWS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

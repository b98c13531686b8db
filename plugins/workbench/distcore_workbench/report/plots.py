"""The curves of a run in a cell of a notebook, or as text."""

from __future__ import annotations

from html import escape
from pathlib import Path

from rich.console import Console

from distcore_workbench.report.folders import folders_of
from distcore_workbench.report.live import drawn_curves
from distcore_workbench.report.report_content import content_of
from distcore_workbench.report.report_page import page

HEIGHT = 600
"""Pixels of the page below a cell; it scrolls."""
COLUMNS = 100
"""Characters of a line of text."""


class Plots:
    """The report of runs: a notebook shows the page, and a prompt the curves as text."""

    def __init__(self, *paths: Path) -> None:
        """Take the folders of the runs; raises ConfigError for one that holds none."""
        self._folders = folders_of(paths, "report")

    def _repr_html_(self) -> str:
        """Return the page, in a frame of its own, so that its styles stay there."""
        text = escape(page(content_of(self._folders)))
        return f'<iframe srcdoc="{text}" width="100%" height="{HEIGHT}" style="border: 0"></iframe>'

    def __repr__(self) -> str:
        return drawn_curves(self._folders, Console(width=COLUMNS)).plain.rstrip("\n")

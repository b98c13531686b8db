"""One HTML page: its style, its scripts and its data are inside it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from html import escape
from typing import Any

from distcore.files import strict_json
from distcore_workbench.pages.figures import Figure
from distcore_workbench.pages.plotly import asset, source

COLORS = "abcdefgh"
"""The colors of the style: ``var(--a)`` in HTML, ``"--a"`` in a figure."""

LONGEST_WORD = 36
"""Characters of a word that a narrow screen can show in one line."""


def color(run: int) -> str:
    """Return the name of a run's color, for a figure; after the eighth run the
    first color comes again.
    """
    return f"--{COLORS[run % len(COLORS)]}"


def command_line() -> str:
    """Return the command that runs, as a user would type it."""
    return shlex.join(["distcore", *sys.argv[1:]])


def document(
    title: str,
    command: str,
    body: str,
    figures: Sequence[Figure] = (),
    axes: Sequence[Any] = (),
) -> str:
    """Return a page: the title, the command that made it, and ``body``, which is HTML.

    ``body`` shows each of ``figures``, in their order, where it has a ``plot_place``. ``axes``:
    values along the axes of steps, epochs and seconds that curves refer to by number.
    """
    scripts = ""
    if figures:
        shown = {"figures": [figure.as_json() for figure in figures], "axes": list(axes)}
        # No text of a run may end the script.
        data = strict_json(shown).replace("<", "\\u003c")
        scripts = (
            f'<script type="application/json" id="data">{data}</script>\n'
            f"<script>{source()}</script>\n<script>{asset('page.js')}</script>\n"
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon"'
        f' href="data:,"><title>{title}</title><style>{asset("page.css")}</style></head><body>\n'
        f"<h1>{title}</h1>\n<p><code>{_words(command)}</code></p>\n{body}{scripts}</body></html>\n"
    )


def _words(command: str) -> str:
    """Return a command as HTML that breaks between words, not at their hyphens."""
    return " ".join(
        f"<span>{escape(word)}</span>" if len(word) <= LONGEST_WORD else escape(word)
        for word in command.split(" ")
    )


def plot_place(title: str) -> str:
    """Return the place of the next figure as HTML."""
    return f'<section class="figure"><h2>{escape(title)}</h2><div class="plot"></div></section>'


def plot_places(figures: Sequence[Figure]) -> str:
    """Return the places of figures side by side as HTML."""
    return (
        f'<div class="figures">\n{"".join(plot_place(figure.title) for figure in figures)}</div>\n'
    )

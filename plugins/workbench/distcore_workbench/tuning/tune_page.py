"""A tune as one HTML page: the finals as ranges, speed and memory of the ladder, and a
table of every trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distcore_workbench.pages.document import document, plot_places
from distcore_workbench.pages.figures import Bar, Figure, bars, ranges
from distcore_workbench.pages.tables import html_table, remark_list
from distcore_workbench.planning.byte_sizes import format_size
from distcore_workbench.tuning.tune_table import HEADINGS, Facts, remarks, tables, trial_cells

MEBIBYTE = 2**20


def page(facts: Facts) -> str:
    """Return the page as HTML; ``facts`` is the content of ``tune.json``."""
    figures = list(_figures(facts))
    chosen = facts["chosen"]["name"] if facts["chosen"] else None
    shown = "".join(
        f"<h2>{title}</h2>\n{html_table(headings, rows, _place(rows, chosen))}\n"
        for title, headings, rows in tables(facts)
        if rows
    )
    trials = html_table(HEADINGS, [trial_cells(one) for one in facts["trials"]])
    body = (
        f"{plot_places(figures)}{shown}{remark_list(remarks(facts))}\n<h2>What was"
        f" tried</h2>\n{trials}\n"
    )
    return document("Tune", facts["command"], body, figures)


def _figures(facts: Facts) -> Iterator[Figure]:
    if facts["finals"]:
        yield ranges("Speed in the finals", "samples/s", [_final(one) for one in facts["finals"]])
    if facts["ladder"]:
        rungs = facts["ladder"]
        yield bars(
            "Speed in the short trials, from fast to frugal",
            "samples/s",
            {"speed": "--a"},
            _speeds(rungs),
        )
        yield bars("Peak memory of a rank", "MiB", {"memory": "--b"}, _peaks(rungs))


def _final(one: Mapping[str, Any]) -> Bar:
    speed, rounds = one["samples_per_second"], one["rounds"]
    # The speed is of the shortest time of each step, so it may exceed that of every round.
    spread = (min(rounds), max(speed, *rounds)) if len(rounds) > 1 else None
    return Bar(name=one["name"], parts=[speed], text=f"{speed:.1f}", spread=spread)


def _speeds(rungs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    speeds = [(one["name"], one["samples_per_second"]) for one in rungs]
    return [Bar(name=name, parts=[speed], text=f"{speed:.1f}") for name, speed in speeds]


def _peaks(rungs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    peaks = [(one["name"], one["peak_bytes"]) for one in rungs]
    return [Bar(name=name, parts=[peak / MEBIBYTE], text=format_size(peak)) for name, peak in peaks]


def _place(rows: Sequence[Sequence[str]], chosen: str | None) -> int | None:
    return next((place for place, row in enumerate(rows) if row[0] == chosen), None)

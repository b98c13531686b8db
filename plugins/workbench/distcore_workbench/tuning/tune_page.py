"""A tune as one HTML page: the finals as ranges, the ladder, and a table of every trial."""

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
    chosen_name = facts["chosen"]["name"] if facts["chosen"] else None
    parts = [plot_places(figures)]
    for title, headings, rows in tables(facts):
        if rows:
            table = html_table(headings, rows, _row_number(rows, chosen_name))
            parts.append(f"<h2>{title}</h2>\n{table}\n")
    parts.append(remark_list(remarks(facts)))
    trials = html_table(HEADINGS, [trial_cells(trial) for trial in facts["trials"]])
    parts.append(f"\n<h2>What was tried</h2>\n{trials}\n")
    return document("Tune", facts["command"], "".join(parts), figures)


def _figures(facts: Facts) -> Iterator[Figure]:
    """Yield the speed of the finals, then speed and memory of the ladder, as far as there are."""
    if facts["finals"]:
        finals = [_final(final) for final in facts["finals"]]
        yield ranges("Speed in the finals", "samples/s", finals)
    if facts["ladder"]:
        rungs = facts["ladder"]
        title = "Speed in the short trials, from fast to frugal"
        yield bars(title, "samples/s", {"speed": "--a"}, _speeds(rungs))
        yield bars("Peak memory of a rank", "MiB", {"memory": "--b"}, _peaks(rungs))


def _final(final: Mapping[str, Any]) -> Bar:
    """Return the speed of a setting in the finals, with its range over several rounds."""
    speed = final["samples_per_second"]
    rounds = final["rounds"]
    spread = None
    if len(rounds) > 1:
        # The speed is of the shortest time of each step, so it may exceed that of every round.
        spread = (min(rounds), max(speed, *rounds))
    return Bar(name=final["name"], parts=[speed], text=f"{speed:.1f}", spread=spread)


def _speeds(rungs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Return a bar in samples per second for each rung of the ladder."""
    speed_bars = []
    for rung in rungs:
        speed = rung["samples_per_second"]
        speed_bars.append(Bar(name=rung["name"], parts=[speed], text=f"{speed:.1f}"))
    return speed_bars


def _peaks(rungs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Return a bar in MiB for each rung of the ladder."""
    memory_bars = []
    for rung in rungs:
        peak = rung["peak_bytes"]
        text = format_size(peak)
        memory_bars.append(Bar(name=rung["name"], parts=[peak / MEBIBYTE], text=text))
    return memory_bars


def _row_number(rows: Sequence[Sequence[str]], name: str | None) -> int | None:
    """Return the number of the row whose first cell is ``name``; ``None`` if there is none."""
    for number, row in enumerate(rows):
        if row[0] == name:
            return number
    return None

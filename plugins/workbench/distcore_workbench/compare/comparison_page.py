"""The HTML page of a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from distcore_workbench.compare.comparison_table import (
    cells,
    explanations,
    has_run,
    headings,
    remarks,
)
from distcore_workbench.compare.facts import Facts
from distcore_workbench.pages.document import document, plot_places
from distcore_workbench.pages.figures import Bar, Figure, bars, log_dots, ranges
from distcore_workbench.pages.tables import html_table, remark_list

HEADLINE = (
    "task",
    "task_options.model",
    "task_options.data",
    "global_batch_size",
    "precision",
    "device",
)
"""Keys of the job that are shown above the table, as far as its task has them."""
PARTS = {
    "start_up_seconds": ("start-up", "--b"),
    "warm_up_seconds": ("warm-up and compilation", "--c"),
    "training_seconds": ("training", "--a"),
    "rest_seconds": ("evaluation, saving, ending", "--d"),
}
"""Part of the wall time to its name and its color."""


def page(facts: Facts) -> str:
    """Return the page as HTML."""
    explained = "".join(f"<li>{escape(line)}</li>" for line in explanations(facts))
    rows = [row for row in facts["rows"] if has_run(row)]
    names = [row["name"] for row in rows]
    reference = names.index(facts["reference"]) if facts["reference"] in names else None
    table = html_table(headings(facts), [cells(row, facts) for row in rows], reference)
    figures = list(_figures(rows, facts)) if rows else []
    return document(
        "Strategies compared",
        facts["command"],
        f'<p class="soft">{escape(_where(facts))}</p>\n'
        f"{table}\n"
        f"{remark_list(remarks(facts))}\n"
        f"{plot_places(figures)}"
        f"<h2>How it was measured</h2>\n<ul>{explained}</ul>\n",
        figures,
    )


def _where(facts: Facts) -> str:
    """Return the job and the machine in one line."""
    machine = facts["machine"]
    job = facts["job"]
    settings = []
    for key in HEADLINE:
        if key in job:
            settings.append(f"{key.rpartition('.')[2]} {job[key]}")
    return (
        f"{', '.join(settings)}; {machine['cores']} cores, {machine['processor']};"
        f" distcore {facts['distcore']}"
    )


def _figures(rows: list[Facts], facts: Facts) -> Iterator[Figure]:
    """Yield speed, time of a step, memory, wall time, and distances where they were measured."""
    named_rows = [(row, cells(row, facts)[0]) for row in rows]
    spread = ", with the range over rounds" if facts["rounds"] > 1 else ""
    speeds = [_speed(row, name) for row, name in named_rows]
    yield bars(f"Speed{spread}", "samples/s", {"speed": "--a"}, speeds)
    steps = [_step(row, name) for row, name in named_rows]
    yield ranges("Time of a step: 5 %, median, 95 %", "ms", steps)
    sizes = [_memory(row, name) for row, name in named_rows]
    yield bars("Peak memory of a rank", "MiB", {"memory": "--a"}, sizes)
    wall_times = [_wall_time(row, name) for row, name in named_rows]
    yield bars("Wall time", "s", dict(PARTS.values()), wall_times)
    distances = []
    for row, name in named_rows:
        if row["distance"] and row["distance"]["relative"] is not None:
            distances.append(_distance(row, name))
    if distances:
        title = f"Distance of the parameters from those of {facts['reference']}"
        yield log_dots(title, "relative distance", distances)


def _speed(row: Facts, name: str) -> Bar:
    """Return the samples per second, with their range over the rounds."""
    speed = row["samples_per_second"]
    low, high = row["samples_per_second_range"]
    return Bar(name=name, parts=[speed], spread=(low, high), text=f"{speed:.1f}")


def _wall_time(row: Facts, name: str) -> Bar:
    """Return the seconds of the whole run, by ``PARTS``."""
    # The rest is a difference of measured times, which may be below 0 by a little.
    parts = [max(0.0, row[key]) for key in PARTS]
    return Bar(name=name, parts=parts, text=f"{row['wall_seconds']:.1f}")


def _step(row: Facts, name: str) -> Bar:
    """Return the milliseconds of the median step, with the range of nine steps in ten."""
    low, middle, high = (row[f"step_p{percentile}_seconds"] * 1e3 for percentile in (5, 50, 95))
    return Bar(name=name, parts=[middle], spread=(low, high), text=f"{middle:.1f}")


def _memory(row: Facts, name: str) -> Bar:
    """Return the peak memory in MiB of the rank with the most."""
    size = row["peak_memory_bytes"] / 2**20
    return Bar(name=name, parts=[size], text=f"{size:.0f}")


def _distance(row: Facts, name: str) -> Bar:
    """Return the relative distance of the parameters from those of the reference."""
    value = row["distance"]["relative"]
    return Bar(name=name, parts=[value], text=f"{value:.1e}" if value else "0")

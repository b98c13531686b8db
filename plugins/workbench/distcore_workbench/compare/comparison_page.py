"""The HTML page of a comparison: one file that works alone, without scripts and without network."""

from __future__ import annotations

from html import escape

from distcore_workbench.compare.comparison_table import cells, explanations, has_run, headings, remarks
from distcore_workbench.compare.facts import Facts
from distcore_workbench.report import plots
from distcore_workbench.report.plots import Part
from distcore_workbench.report.report_page import document, html_table, legend, remark_list

HEADLINE = ("task", "task_options.model", "task_options.data", "global_batch_size", "precision", "device")
"""Keys of the job that stand above the table, as far as its task has them."""
PARTS = {
    "start_up_seconds": ("b", "start-up"),
    "warm_up_seconds": ("c", "warm-up and compilation"),
    "training_seconds": ("a", "training"),
    "rest_seconds": ("d", "evaluation, saving, ending"),
}
"""Part of the wall time to its color, a class of the style, and its name in the legend."""


def page(facts: Facts) -> str:
    """Return the page as HTML."""
    explained = "".join(f"<li>{escape(line)}</li>" for line in explanations(facts))
    rows = [row for row in facts["rows"] if has_run(row)]
    reference = next((index for index, row in enumerate(rows) if row["name"] == facts["reference"]), None)
    table = html_table(headings(facts), [cells(row, facts) for row in rows], reference)
    return document(
        "Strategies compared",
        facts["command"],
        f'<p class="soft">{escape(_where(facts))}</p>\n{table}\n{remark_list(remarks(facts))}\n'
        f"{_plots(rows, facts) if rows else ''}"
        f"<h2>How it was measured</h2>\n<ul>{explained}</ul>\n",
    )


def _where(facts: Facts) -> str:
    """Return in one line what was trained, on which machine."""
    machine, job = facts["machine"], facts["job"]
    said = ", ".join(f"{key.rpartition('.')[2]} {job[key]}" for key in HEADLINE if key in job)
    return f"{said}; {machine['cores']} cores, {machine['processor']}; distcore {facts['distcore']}"


def _plots(rows: list[Facts], facts: Facts) -> str:
    shown = {
        "Samples per second, with the range over rounds": plots.bars([_speed(row, facts) for row in rows]),
        f"Parts of the wall time, in seconds {legend(PARTS.values())}": plots.bars([_wall(row, facts) for row in rows]),
        "Step time in milliseconds: 5 %, median, 95 %": plots.ranges([_step(row, facts) for row in rows]),
        "Peak memory of a rank, in MiB": plots.bars([_memory(row, facts) for row in rows]),
    }
    distances = [_distance(row, facts) for row in rows if row["distance"] and row["distance"]["relative"] is not None]
    if distances:
        shown[f"Parameters: relative distance from {escape(facts['reference'])}"] = plots.log_dots(distances)
    return "".join(f"<h2>{title}</h2>\n{plot}\n" for title, plot in shown.items())


def _label(row: Facts, facts: Facts) -> str:
    return cells(row, facts)[0]


def _speed(row: Facts, facts: Facts) -> tuple[str, list[Part], tuple[float, float] | None, str]:
    speed, (low, high) = row["samples_per_second"], row["samples_per_second_range"]
    return _label(row, facts), [Part(speed, "a", f"{speed:.1f} samples/s")], (low, high), f"{speed:.1f}"


def _wall(row: Facts, facts: Facts) -> tuple[str, list[Part], None, str]:
    parts = [Part(max(0.0, row[key]), color, f"{what}: {row[key]:.2f} s") for key, (color, what) in PARTS.items()]
    return _label(row, facts), parts, None, f"{row['wall_seconds']:.1f} s"


def _step(row: Facts, facts: Facts) -> tuple[str, float, float, float, str]:
    low, middle, high = (row[f"step_p{part}_seconds"] * 1e3 for part in (5, 50, 95))
    return _label(row, facts), low, middle, high, f"{middle:.1f} ({low:.1f} … {high:.1f})"


def _memory(row: Facts, facts: Facts) -> tuple[str, list[Part], None, str]:
    size = row["peak_memory_bytes"] / 2**20
    return _label(row, facts), [Part(size, "a", f"{size:.0f} MiB")], None, f"{size:.0f}"


def _distance(row: Facts, facts: Facts) -> tuple[str, float, str]:
    value = row["distance"]["relative"]
    return _label(row, facts), value, f"{value:.1e}" if value else "0"

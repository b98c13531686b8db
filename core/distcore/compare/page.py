"""The HTML page of a comparison: one file that works alone, without scripts and without network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from distcore.compare import plots
from distcore.compare.facts import Facts
from distcore.compare.plots import Part
from distcore.compare.table import cells, explanations, has_run, headings, remarks

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6877; --paper: #fff; --line: #d8dee6;
  --a: #3b6fb6; --b: #d98a29; --c: #4b9e6a; --d: #9aa5b1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa5b4; --paper: #14181e; --line: #323b47;
  --a: #6fa0e0; --b: #e6a755; --c: #70bd8d; --d: #66717e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
code { overflow-wrap: anywhere; } p.soft, li { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
tr.reference td:first-child { font-weight: 600; }
ul.remarks li { color: var(--ink); }
svg { width: 100%; max-width: 760px; height: auto; font-size: 12px; }
svg text { fill: var(--ink); } svg .name { text-anchor: end; } svg .tick { text-anchor: middle; fill: var(--soft); }
svg .axis { stroke: var(--soft); } svg .grid { stroke: var(--line); }
svg .whisker { stroke: var(--ink); fill: none; } .dot { fill: var(--a); }
.a { fill: var(--a); background: var(--a); } .b { fill: var(--b); background: var(--b); }
.c { fill: var(--c); background: var(--c); } .d { fill: var(--d); background: var(--d); }
.legend span { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; border-radius: 2px; }
"""
HEADLINE = ("task", "task_options.model", "task_options.data", "global_batch_size", "precision", "device")
"""Keys of the job that stand above the table, as far as its task has them."""
PARTS = {
    "start_up_seconds": ("b", "start-up"),
    "warm_up_seconds": ("c", "warm-up and compilation"),
    "training_seconds": ("a", "training"),
    "rest_seconds": ("d", "evaluation, saving, ending"),
}
"""Part of the wall time to its colour, a class of the style, and its name in the legend."""


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


def document(title: str, command: str, body: str) -> str:
    """Return a page of its own: the title, the command that made it, and ``body``, which is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{title}</h1>\n<p><code>{escape(command)}</code></p>\n{body}</body></html>\n"
    )


def html_table(names: Sequence[str], rows: Iterable[Sequence[str]], reference: int | None = None) -> str:
    """Return a table as HTML; ``reference`` is the number of the row that stands out."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ""
    for index, row in enumerate(rows):
        marked = ' class="reference"' if index == reference else ""
        body += f"<tr{marked}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def remark_list(lines: Iterable[str]) -> str:
    """Return the remarks below a table as HTML."""
    return f'<ul class="remarks">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def _where(facts: Facts) -> str:
    """Return in one line what was trained, on which machine."""
    machine, job = facts["machine"], facts["job"]
    said = ", ".join(f"{key.rpartition('.')[2]} {job[key]}" for key in HEADLINE if key in job)
    return f"{said}; {machine['cores']} cores, {machine['processor']}; distcore {facts['distcore']}"


def _plots(rows: list[Facts], facts: Facts) -> str:
    shown = {
        "Samples per second, with the range over rounds": plots.bars([_speed(row, facts) for row in rows]),
        f"Parts of the wall time, in seconds {_legend()}": plots.bars([_wall(row, facts) for row in rows]),
        "Step time in milliseconds: 5 %, median, 95 %": plots.ranges([_step(row, facts) for row in rows]),
        "Peak memory of a rank, in MiB": plots.bars([_memory(row, facts) for row in rows]),
    }
    distances = [_distance(row, facts) for row in rows if row["distance"] and row["distance"]["relative"] is not None]
    if distances:
        shown[f"Parameters: relative distance from {escape(facts['reference'])}"] = plots.log_dots(distances)
    return "".join(f"<h2>{title}</h2>\n{plot}\n" for title, plot in shown.items())


def _legend() -> str:
    keys = "".join(f'<span class="{colour}"></span>{what}' for colour, what in PARTS.values())
    return f'<small class="legend">{keys}</small>'


def _label(row: Facts, facts: Facts) -> str:
    return cells(row, facts)[0]


def _speed(row: Facts, facts: Facts) -> tuple[str, list[Part], tuple[float, float] | None, str]:
    speed, (low, high) = row["samples_per_second"], row["samples_per_second_range"]
    return _label(row, facts), [Part(speed, "a", f"{speed:.1f} samples/s")], (low, high), f"{speed:.1f}"


def _wall(row: Facts, facts: Facts) -> tuple[str, list[Part], None, str]:
    parts = [Part(max(0.0, row[key]), colour, f"{what}: {row[key]:.2f} s") for key, (colour, what) in PARTS.items()]
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

"""A plan as one HTML page, which works alone: bars of what each rank holds, and what lives over a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from distcore_workbench.planning.byte_sizes import shown
from distcore_workbench.planning.plan import Plan, Row
from distcore_workbench.planning.plan_table import HEADINGS, cells, remarks
from distcore_workbench.planning.timeline import KINDS, Moment
from distcore_workbench.report import plots
from distcore_workbench.report.plots import Part
from distcore_workbench.report.report_page import document, html_table, legend, remark_list

COLOURS = dict(zip(KINDS, "abce", strict=True))
"""Map each purpose of memory to its color, a class of the style."""
WIDTH, HEIGHT, LEFT, BELOW = 760, 220, 70, 24
"""Size of a timeline, and of its margins."""
MEBIBYTE = 2**20


def page(plan: Plan, devices: Mapping[str, int], command: str) -> str:
    """Return the page as HTML; ``devices`` are the sizes to fit into, in bytes, ``command`` what made it."""
    known = [row for row in plan.rows if row.memory is not None]
    about = f"{plan.model}: {plan.parameters:,} parameters, {plan.trained:,} of them trained; a checkpoint has "
    unknown = [f"{r.strategy} on {r.world} rank(s): not known: {r.reason}" for r in plan.rows if r.memory is None]
    headings = [*HEADINGS, *(f"fits {size}" for size in devices)]
    body = [
        f'<p class="soft">{escape(about)}{shown(plan.checkpoint)}</p>',
        html_table(headings, [cells(row, devices) for row in known]),
        remark_list([*remarks(plan), *unknown]),
    ]
    if known:
        body += [f"<h2>Memory of a rank at its peak, in MiB {legend((c, k) for k, c in COLOURS.items())}</h2>"]
        body += [plots.bars([_bar(row) for row in known])]
    for row in known:
        if row.step is not None:
            body += [f"<h2>{escape(_name(row))}: what lives over a step</h2>", _timeline(row.step.moments)]
    return document("Plan" if plan.device == "cpu" else "Plan (estimate)", command, "\n".join(body) + "\n")


def _name(row: Row) -> str:
    return f"{row.strategy} on {row.world}"


def _bar(row: Row) -> tuple[str, list[Part], None, str]:
    """Return the bar of a row: what lives at its peak, or where that is not known, between steps."""
    assert row.memory is not None
    held = row.memory
    sizes = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.stepped}
    if row.step is not None:
        sizes = {kind: getattr(row.step.peak, kind) for kind in KINDS}
    parts = [Part(size / MEBIBYTE, COLOURS[kind], f"{kind}: {shown(size)}") for kind, size in sizes.items()]
    return _name(row), parts, None, shown(sum(sizes.values())) + ("" if row.step else " (states)")


def _timeline(moments: Sequence[Moment]) -> str:
    """Return what lives, operation by operation, as areas on each other; lines are where phases begin."""
    most = max(moment.total for moment in moments) or 1
    wide, high = WIDTH - LEFT, HEIGHT - BELOW
    xs = [LEFT + wide * index / max(1, len(moments) - 1) for index in range(len(moments))]
    below, areas = [0] * len(moments), []
    for kind in KINDS:
        above = [low + getattr(moment, kind) for low, moment in zip(below, moments, strict=True)]
        there = [f"{x:.1f},{high - high * y / most:.1f}" for x, y in zip(xs, above, strict=True)]
        back = [f"{x:.1f},{high - high * y / most:.1f}" for x, y in zip(xs, below, strict=True)][::-1]
        areas.append(
            f'<polygon class="{COLOURS[kind]}" points="{" ".join(there + back)}"><title>{kind}</title></polygon>'
        )
        below = above
    marks = []
    begun: str | None = None
    for x, moment in zip(xs, moments, strict=True):
        if moment.phase != begun:
            begun = moment.phase
            marks.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{high}"/>')
            marks.append(f'<text x="{x + 4:.1f}" y="{HEIGHT - 6}">{begun}</text>')
    scale = f'<text class="scale" x="{LEFT - 6}" y="12">{shown(most)}</text>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(areas + marks)}{scale}</svg>'

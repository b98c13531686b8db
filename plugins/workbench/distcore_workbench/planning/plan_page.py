"""A plan as one HTML page: the memory of each rank in bars, and over a step as areas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from distcore_workbench.pages.document import document, plot_places
from distcore_workbench.pages.figures import Bar, Figure, bars
from distcore_workbench.pages.tables import html_table, remark_list
from distcore_workbench.planning.byte_sizes import format_size
from distcore_workbench.planning.plan import MemoryPlan, Row
from distcore_workbench.planning.plan_table import HEADINGS, cells, remarks
from distcore_workbench.planning.timeline import KINDS, Moment

COLORS = dict(zip(KINDS, ("--a", "--b", "--c", "--e"), strict=True))
"""Map each purpose of memory to its color."""
MEBIBYTE = 2**20


def page(plan: MemoryPlan, devices: Mapping[str, int], command: str) -> str:
    """Return the page as HTML; ``devices`` are the sizes to fit into, in bytes.

    ``command`` made the page.
    """
    rows_with_memory = [row for row in plan.rows if row.memory is not None]
    about = (
        f"{plan.model}: {plan.parameters:,} parameters, {plan.trained:,} of them trained; a"
        " checkpoint has "
    )
    unknown = [
        f"{r.strategy} on {r.world} rank(s): not known: {r.reason}"
        for r in plan.rows
        if r.memory is None
    ]
    headings = [*HEADINGS, *(f"fits {size}" for size in devices)]
    table = html_table(headings, [cells(row, devices) for row in rows_with_memory])
    figures = list(_figures(rows_with_memory)) if rows_with_memory else []
    body = (
        f'<p class="soft">{escape(about)}{format_size(plan.checkpoint)}</p>\n{table}\n'
        f"{remark_list([*remarks(plan), *unknown])}\n{plot_places(figures)}"
    )
    return document("Plan" if plan.device == "cpu" else "Plan (estimate)", command, body, figures)


def _figures(rows: Sequence[Row]) -> Iterator[Figure]:
    yield bars("Memory of a rank at its peak", "MiB", COLORS, [_bar(row) for row in rows])
    for row in rows:
        if row.step is not None:
            yield _timeline(f"{_name(row)}: memory over a step", row.step.moments)


def _name(row: Row) -> str:
    return f"{row.strategy} on {row.world}"


def _bar(row: Row) -> Bar:
    """Return the bar of a row: the memory at its peak, or where that is
    not known, between steps.
    """
    assert row.memory is not None
    held = row.memory
    sizes = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.stepped,
        "activations": 0,
    }
    if row.step is not None:
        sizes = {kind: getattr(row.step.peak, kind) for kind in KINDS}
    text = format_size(sum(sizes.values()))
    if not row.step:
        text += " (states)"
    parts = [sizes[kind] / MEBIBYTE for kind in KINDS]
    return Bar(name=_name(row), parts=parts, text=text)


def _timeline(title: str, moments: Sequence[Moment]) -> Figure:
    """Return the memory, operation by operation, as areas on each other; lines
    are where phases begin.
    """
    positions = list(range(len(moments)))
    traces = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "memory", "name": kind,
            "x": positions,
            "y": [round(getattr(moment, kind) / MEBIBYTE, 2) for moment in moments],
            "line": {"width": 0, "color": COLORS[kind]}, "fillcolor": COLORS[kind],
            "hovertemplate": "%{y:.4~g} MiB",
        }
        for kind in KINDS
    ]  # fmt: skip
    begins = [n for n in positions if n == 0 or moments[n].phase != moments[n - 1].phase]
    lines = [
        {
            "type": "line",
            "x0": n,
            "x1": n,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"width": 1, "color": "--soft"},
        }
        for n in begins
    ]
    names = [
        {
            "x": n,
            "yref": "paper",
            "y": 1,
            "text": moments[n].phase,
            "showarrow": False,
            "xanchor": "left",
            "yanchor": "top",
            "font": {"color": "--ink"},
            "bgcolor": "--paper",
            "opacity": 0.8,
        }
        for n in begins
    ]
    layout = {
        "xaxis": {"title": "operation of the step, sampled"},
        "yaxis": {"title": "MiB", "rangemode": "tozero"},
        "shapes": lines,
        "annotations": names,
        "showlegend": True,
        "hovermode": "x unified",
    }
    return Figure(title=title, traces=traces, layout=layout)

"""A report as one HTML page, which works alone: its curves are SVG inside it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from distcore_workbench.report.line_chart import line_chart
from distcore_workbench.report.model_and_data import Content
from distcore_workbench.report.predictions import Confusion
from distcore_workbench.report.report_page import (
    COLOURS,
    document,
    html_table,
    legend,
    remark_list,
    shaded_table,
    text_table,
)
from distcore_workbench.report.side_by_side import cells, headings
from distcore_workbench.report.terminal import skipped_fraction


def page(content: Content) -> str:
    """Return the page as HTML."""
    return document("Report", content.facts["command"], "\n".join(_parts(content)) + "\n")


def _parts(content: Content) -> Iterator[str]:
    yield from (f'<p class="soft">{escape(line)}</p>' for line in content.about)
    yield html_table(headings(content.facts), cells(content.facts))
    yield remark_list(content.remarks)
    keys = [(COLOURS[run % len(COLOURS)], name) for run, name in enumerate(content.names)]
    yield f"<p>{legend(keys)}</p>"
    for chart in content.charts:
        beside = len({curve.group for curve in chart.curves}) > 1
        title = f"{chart.title}, of evaluations dashed" if beside else chart.title
        yield f"<h2>{escape(title)}</h2>\n{line_chart(chart, content.names)}"
    for name, answers in zip(content.names, content.answers, strict=True):
        if answers is not None:
            yield from _answers(name, answers)


def _answers(name: str, answers: Confusion | list[dict[str, str]]) -> Iterator[str]:
    if isinstance(answers, Confusion):
        yield f"<h2>{escape(name)}: rows by class, and what they were predicted as{skipped_fraction(answers)}</h2>"
        yield shaded_table(["class", *answers.classes], zip(answers.classes, answers.counts, strict=True))
        return
    yield f"<h2>{escape(name)}: the first answers of the final test</h2>"
    columns = list(dict.fromkeys(key for row in answers for key in row))
    yield text_table(columns, [[row.get(key, "") for key in columns] for row in answers])

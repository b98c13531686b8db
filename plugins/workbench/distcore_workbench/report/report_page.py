"""A report as one HTML page: the settings in which runs differ and their
results, curves, and predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from distcore_workbench.pages.document import color, document, plot_places
from distcore_workbench.pages.tables import (
    html_table,
    remark_list,
    shaded_table,
    text_table,
    turned_table,
)
from distcore_workbench.report.curve_figures import CurveFigures, controls
from distcore_workbench.report.curves import Chart
from distcore_workbench.report.predictions import Confusion
from distcore_workbench.report.report_content import Content
from distcore_workbench.report.settings_figure import settings_figure
from distcore_workbench.report.side_by_side import Facts, cells, headings
from distcore_workbench.report.terminal import describe_hidden_classes

MOST_COLUMNS = 12
"""Columns of a table that a wide screen shows without breaking words."""
MOST_ANSWERS = 8
"""Runs whose predictions are shown, so that the file stays small."""


def page(content: Content) -> str:
    """Return the page as HTML."""
    about = f'<p class="soft">{escape(content.about)}</p>'
    return runs_page(
        "Report",
        content.facts,
        content.charts,
        content.remarks,
        about,
        "\n".join(_answers(content)),
    )


def runs_page(
    title: str,
    facts: Facts,
    charts: Sequence[Chart],
    remarks: Iterable[str],
    above: str = "",
    below: str = "",
) -> str:
    """Return a page of the table of runs and their curves.

    ``above`` and ``below`` are HTML before and after them.
    """
    names = [str(run["name"]) for run in facts["runs"]]
    curves = CurveFigures(charts, names)
    figures = [*filter(None, [settings_figure(facts)]), *curves.figures]
    drawn = f"{controls(names) if charts else ''}{plot_places(figures)}" if figures else ""
    body = f"{above}\n{runs_table(facts)}\n{remark_list(remarks)}\n{drawn}{below}\n"
    return document(title, facts["command"], body, figures, curves.axes)


def runs_table(facts: Facts) -> str:
    """Return the table of runs as HTML: a row a run, or a column for few runs of many settings."""
    names = headings(facts)
    rows = cells(facts)
    if len(names) > max(MOST_COLUMNS, len(rows)):
        return turned_table(names, rows)
    colors = [color(run) for run in range(len(rows))]
    return html_table(names, rows, colors=colors)


def _answers(content: Content) -> Iterator[str]:
    """Yield the predictions of the first runs that have some, as HTML."""
    answered = []
    for name, answers in zip(content.names, content.answers, strict=True):
        if answers is not None:
            answered.append((name, answers))
    yield '<div class="figures">'
    for name, answers in answered[:MOST_ANSWERS]:
        yield from ('<section class="figure">', *_answers_of(name, answers), "</section>")
    yield "</div>"
    not_shown = len(answered) - MOST_ANSWERS
    if not_shown > 0:
        yield f'<p class="soft">The predictions of {not_shown} more runs are not shown.</p>'


def _answers_of(name: str, answers: Confusion | list[dict[str, str]]) -> Iterator[str]:
    """Yield a run's confusion matrix, or its first predictions, as HTML."""
    if isinstance(answers, Confusion):
        yield (
            f"<h2>{escape(name)}: rows by class, and the classes"
            f" predicted{describe_hidden_classes(answers)}</h2>"
        )
        yield shaded_table(
            ["class", *answers.classes], zip(answers.classes, answers.counts, strict=True)
        )
        return
    yield f"<h2>{escape(name)}: the first predictions of the final test</h2>"
    columns: dict[str, None] = {}
    for row in answers:
        columns.update(dict.fromkeys(row))
    cells_of_rows = [[row.get(column, "") for column in columns] for row in answers]
    yield text_table(list(columns), cells_of_rows)

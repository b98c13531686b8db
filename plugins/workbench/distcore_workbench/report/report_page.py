"""A report as one HTML page: the settings in which runs differ and their
results, curves, and predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from distcore_workbench.report.predictions import Answers, Classified
from distcore_workbench.report.report_content import Content
from distcore_workbench.report.settings_figure import settings_figure
from distcore_workbench.report.side_by_side import Facts, Part, cells, headings
from distcore_workbench.report.terminal import (
    CORNER,
    REPORT_HEADINGS,
    describe_matrix,
    report_cells,
)

MOST_COLUMNS = 12
"""Columns of a table that a wide screen shows without breaking words."""
COSTS = "Times, memory and other curves"
"""What is folded away."""
MOST_ANSWERS = 8
"""Runs whose predictions are shown, so that the file stays small."""


def page(content: Content) -> str:
    """Return the page as HTML: results and predictions, then loss and metrics over the run, and
    folded away what the run cost.
    """
    facts, names = content.facts, content.names
    main = content.main_charts
    others = [chart for chart in content.charts if chart not in main]
    # In one drawing, so that the controls of the page are those of all curves.
    curves = CurveFigures([*main, *others], names)
    setting_figures = [*filter(None, [settings_figure(facts)])]
    main_figures = [*setting_figures, *curves.figures[: len(main)]]
    folded_figures = curves.figures[len(main) :]
    body = "\n".join(
        [
            f'<p class="soft">{escape(content.about)}</p>',
            runs_table(facts, "results"),
            remark_list(content.remarks),
            *_answers(content),
            controls(names),
            plot_places(main_figures),
            f"<details><summary>{COSTS}</summary>",
            runs_table(facts, "costs"),
            remark_list(content.time_remarks),
            plot_places(folded_figures) if folded_figures else "",
            "</details>",
        ]
    )
    return document("Report", facts["command"], body, [*main_figures, *folded_figures], curves.axes)


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


def runs_table(facts: Facts, part: Part = "all") -> str:
    """Return a part of the table of runs as HTML: a row a run, or a column for few runs of many
    settings.
    """
    names = headings(facts, part)
    rows = cells(facts, part)
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


def _answers_of(name: str, answers: Answers) -> Iterator[str]:
    """Yield a run's classification report, confusion matrix and wrong predictions, or its first
    predictions, as HTML.
    """
    if not isinstance(answers, Classified):
        yield f"<h2>{escape(name)}: the first predictions of the final test</h2>"
        yield _sample_table(answers)
        return
    confusion = answers.confusion
    yield f"<h2>{escape(name)}: classification report</h2>"
    yield html_table(REPORT_HEADINGS, report_cells(answers.report))
    yield f"<h2>{escape(name)}: confusion matrix{describe_matrix(confusion)}</h2>"
    yield shaded_table(
        [CORNER, *confusion.classes], zip(confusion.classes, confusion.counts, strict=True)
    )
    if answers.wrong:
        yield f"<h2>{escape(name)}: wrong with the most confidence</h2>"
        yield _sample_table(answers.wrong)


def _sample_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows of predictions as HTML, with a column for each of their values."""
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    cells_of_rows = [[row.get(column, "") for column in columns] for row in rows]
    return text_table(list(columns), cells_of_rows)

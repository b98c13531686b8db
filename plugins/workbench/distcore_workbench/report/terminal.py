"""A report in the terminal: curves as sparklines, tables, and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distcore.cli import GAP, print_cells, print_described, say
from distcore_workbench.report.curves import Chart, Point
from distcore_workbench.report.predictions import (
    OTHERS,
    Answers,
    Classified,
    ClassReport,
    Confusion,
)
from distcore_workbench.report.report_content import Content
from distcore_workbench.report.side_by_side import Part, cells, headings

BARS = "▁▂▃▄▅▆▇█"
"""Eighths of a line's height."""
CONSTANT = "─"
"""The character of a baseline's line."""
WIDEST = 60
"""Characters of a sparkline."""
NUMBERS = ("last", "least", "most")
LONGEST_NAME = 24
"""Characters of a name in the table of curves."""
SAMPLES = 3
"""Rows that are shown of each run."""
MAIN_CURVES = 2
"""Charts of a short report: the loss and a metric."""
REPORT_HEADINGS = ["class", "precision", "recall", "F1", "rows"]
CORNER = "class ↓ predicted →"
"""Heading of the classes beside a confusion matrix."""


def show(content: Content, console: Console, everything: bool = False) -> None:
    """Print the report, its tables folded on a narrow screen: results, predictions and two charts.

    With ``everything`` there are all curves, wrong predictions, times and memory, too.
    """
    part: Part = "all" if everything else "results"
    say(console, content.about)
    console.print()
    print_cells(console, headings(content.facts, part), cells(content.facts, part), numbers=True)
    for name, answers in zip(content.names, content.answers, strict=True):
        if answers is not None:
            console.print()
            _show_answers(name, answers, console, everything)
    console.print()
    charts = content.charts if everything else tuple(content.main_charts[:MAIN_CURVES])
    show_curves(replace(content, charts=charts), console)
    remarks = content.remarks
    if everything:
        remarks += content.time_remarks
    for line in remarks:
        say(console, line)
    if not everything:
        say(console, "--all shows the other curves, times and memory")


def show_curves(content: Content, console: Console) -> None:
    """Print one line per curve: a sparkline, and the last, the least and the greatest value.

    Sparklines are as wide as the screen allows and share one axis of steps; each has a
    scale of its own.
    """
    has_several_runs = len(content.names) > 1
    gap_to_the_right = (0, GAP, 0, 0)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=gap_to_the_right)
    rows = [row for chart in content.charts for row in _rows(chart, content.names)]
    cells_of_rows = [row_cells for row_cells, _ in rows]
    curve_column, run_column, *number_columns = zip(*cells_of_rows, strict=True)
    text_columns = {"curve": curve_column}
    if has_several_runs:
        text_columns["run"] = run_column
    for heading, column in text_columns.items():
        width = _width([heading, *column])
        table.add_column(heading, no_wrap=True, overflow="ellipsis", width=width)
    number_widths = []
    for heading, column in zip(NUMBERS, number_columns, strict=True):
        number_widths.append(max(map(len, [heading, *column])))
    steps = [point.step for _, points in rows for point in points]
    span = (min(steps), max(steps))
    axis = f"steps {span[0]} to {span[1]}"
    used = sum(GAP + (text_column.width or 0) for text_column in table.columns)
    used += sum(GAP + width for width in number_widths)
    # Never narrower than its heading, which would be cut off.
    line_width = min(WIDEST, max(len(axis), console.width - used))
    table.add_column(axis, no_wrap=True, width=line_width)
    for heading, width in zip(NUMBERS, number_widths, strict=True):
        table.add_column(heading, justify="right", no_wrap=True, width=width)
    for (curve, run, *numbers), points in rows:
        line = sparkline(points, span, line_width) or CONSTANT * line_width
        texts = [curve, run] if has_several_runs else [curve]
        # As Text, since a name such as "[red]" is no markup.
        table.add_row(*map(Text, [*texts, line, *numbers]))
    console.print(table)


def sparkline(points: Sequence[Point], span: tuple[int, int], width: int) -> str:
    """Return the curve as bars of one line's height, from its least value to its greatest.

    ``span`` are the steps at both ends of the line; between two points it goes on as it was.
    """
    first, last = span
    values_by_column: dict[int, list[float]] = {}
    for point in points:
        column = (point.step - first) * width // (last - first + 1)
        values_by_column.setdefault(column, []).append(point.value)
    if not values_by_column:
        return ""
    means = {}
    for column, values in values_by_column.items():
        means[column] = sum(values) / len(values)
    low = min(means.values())
    high = max(means.values())
    line = ""
    bar = " "
    for column in range(max(means) + 1):
        if column in means:
            # A curve without changes lies in the middle.
            share = (means[column] - low) / (high - low) if high > low else 0.4
            bar = BARS[round(share * (len(BARS) - 1))]
        line += bar
    return line


def _rows(chart: Chart, names: Sequence[str]) -> Iterator[tuple[list[str], Sequence[Point]]]:
    """Yield the cells of each curve and its points, then those of the baselines.

    The cells are name, run and ``NUMBERS``, without the sparkline; baselines have no points.
    """
    has_both_groups = {curve.group for curve in chart.curves} == {"train", "eval"}
    for curve in chart.curves:
        title = f"{curve.group} {chart.title}" if has_both_groups else chart.title
        values = [point.value for point in curve.points]
        numbers = (values[-1], min(values), max(values))
        yield [title, names[curve.run], *map(short, numbers)], curve.points
    for baseline in chart.baselines:
        run_name = "all" if baseline.run is None else names[baseline.run]
        # A constant: the last, the least and the greatest value are one.
        numbers_of_baseline = [short(baseline.value)] * len(NUMBERS)
        yield [baseline.name, run_name, *numbers_of_baseline], ()


def short(value: float) -> str:
    """Return a number in four digits."""
    return f"{value:.4g}"


def _width(texts: Sequence[str]) -> int:
    """Return the width of a column of names."""
    return min(LONGEST_NAME, max(map(len, texts)))


def _show_answers(name: str, answers: Answers, console: Console, everything: bool) -> None:
    """Print classification report and confusion matrix of a run's final test, or its first
    predictions.
    """
    if not isinstance(answers, Classified):
        say(console, f"{name}: the first predictions of the final test")
        _show_samples(answers[:SAMPLES], console)
        return
    say(console, f"{name}: classification report")
    print_cells(console, REPORT_HEADINGS, report_cells(answers.report), numbers=True)
    console.print()
    confusion = answers.confusion
    say(console, f"{name}: confusion matrix{describe_matrix(confusion)}")
    rows = []
    for label, counts in zip(confusion.classes, confusion.counts, strict=True):
        rows.append([label, *map(str, counts)])
    print_cells(console, [CORNER, *confusion.classes], rows, numbers=True)
    if everything and answers.wrong:
        console.print()
        say(console, f"{name}: wrong with the most confidence")
        _show_samples(answers.wrong[:SAMPLES], console)


def _show_samples(rows: Sequence[Mapping[str, str]], console: Console) -> None:
    """Print the values of some rows, one below the other."""
    for row in rows:
        # A text of several lines would leave its column.
        lines = [[key, " ".join(text.split())] for key, text in row.items()]
        print_described(console, ["", ""], lines)


def report_cells(report: Sequence[ClassReport]) -> list[list[str]]:
    """Return the cells of a classification report, a row a class."""
    rows = []
    for of_class in report:
        shares = (of_class.precision, of_class.recall, of_class.f1)
        rows.append([of_class.name, *(f"{share:.3f}" for share in shares), str(of_class.rows)])
    return rows


def describe_matrix(confusion: Confusion) -> str:
    """Return in words how many classes a confusion matrix shows as one; empty if it shows all."""
    if not confusion.hidden_classes:
        return ""
    return f"; {OTHERS} are {confusion.hidden_classes} classes with fewer rows"

"""A report in the terminal: curves as sparklines, tables, and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distcore.cli import GAP, print_cells, print_described, say
from distcore_workbench.report.curves import Chart, Point
from distcore_workbench.report.predictions import Confusion
from distcore_workbench.report.report_content import Content
from distcore_workbench.report.side_by_side import cells, headings

BARS = "▁▂▃▄▅▆▇█"
"""Eighths of a line's height."""
CONSTANT = "─"
"""Of the line of a baseline."""
WIDEST = 60
"""Characters of a sparkline."""
NUMBERS = ("last", "least", "most")
LONGEST_NAME = 24
"""Characters of a name in the table of curves."""
SAMPLES = 3
"""Rows that are shown of each run."""


def show(content: Content, console: Console) -> None:
    """Print the whole report, its tables folded on a narrow screen."""
    say(console, content.about)
    console.print()
    show_curves(content, console)
    console.print()
    print_cells(console, headings(content.facts), cells(content.facts), numbers=True)
    for name, answers in zip(content.names, content.answers, strict=True):
        if answers is not None:
            console.print()
            _show_answers(name, answers, console)
    for line in content.remarks:
        say(console, line)


def show_curves(content: Content, console: Console) -> None:
    """Print one line per curve: a sparkline, and the last, the least and the greatest value.

    Sparklines are as wide as the screen allows and share one axis of steps; each has a
    scale of its own.
    """
    several = len(content.names) > 1
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    rows = [row for chart in content.charts for row in _rows(chart, content.names)]
    for heading, column in zip(
        ("curve", "run"), zip(*(row for row, _ in rows), strict=False), strict=False
    ):
        if heading == "curve" or several:
            table.add_column(
                heading, no_wrap=True, overflow="ellipsis", width=_width([heading, *column])
            )
    steps = [point.step for _, points in rows for point in points]
    span = (min(steps), max(steps))
    axis = f"steps {span[0]} to {span[1]}"
    widths = [
        max(map(len, column)) for column in zip(NUMBERS, *(row[2:] for row, _ in rows), strict=True)
    ]
    used = sum(GAP + (column.width or 0) for column in table.columns) + sum(
        GAP + width for width in widths
    )
    room = min(WIDEST, max(len(axis), console.width - used))
    table.add_column(axis, no_wrap=True, width=room)
    for heading, width in zip(NUMBERS, widths, strict=True):
        table.add_column(heading, justify="right", no_wrap=True, width=width)
    for (curve, run, *numbers), points in rows:
        line = sparkline(points, span, room) or CONSTANT * room
        # a name is no markup
        table.add_row(*map(Text, [curve, *([run] if several else []), line, *numbers]))
    console.print(table)


def sparkline(points: Sequence[Point], span: tuple[int, int], width: int) -> str:
    """Return the curve as bars of one line's height, from its least value to its greatest.

    ``span`` are the steps at both ends of the line; between two points it goes on as it was.
    """
    first, last = span
    bins: dict[int, list[float]] = {}
    for point in points:
        bins.setdefault((point.step - first) * width // (last - first + 1), []).append(point.value)
    if not bins:
        return ""
    means = {place: sum(values) / len(values) for place, values in bins.items()}
    low, high, line, bar = min(means.values()), max(means.values()), "", " "
    for place in range(max(means) + 1):
        if place in means:  # a curve without changes lies in the middle
            share = (means[place] - low) / (high - low) if high > low else 0.4
            bar = BARS[round(share * (len(BARS) - 1))]
        line += bar
    return line


def _rows(chart: Chart, names: Sequence[str]) -> Iterator[tuple[list[str], Sequence[Point]]]:
    """Yield for each curve its cells, without the sparkline, and its points; then the
    baselines, which have none.
    """
    both = {curve.group for curve in chart.curves} == {"train", "eval"}
    for curve in chart.curves:
        title = f"{curve.group} {chart.title}" if both else chart.title
        values = [point.value for point in curve.points]
        yield (
            [title, names[curve.run], *map(short, (values[-1], min(values), max(values)))],
            curve.points,
        )
    for one in chart.baselines:
        yield (
            [
                one.name,
                "all" if one.run is None else names[one.run],
                *[short(one.value)] * len(NUMBERS),
            ],
            (),
        )


def short(value: float) -> str:
    """Return a number in four digits."""
    return f"{value:.4g}"


def _width(texts: Sequence[str]) -> int:
    return min(LONGEST_NAME, max(map(len, texts)))


def _show_answers(name: str, answers: Confusion | list[dict[str, str]], console: Console) -> None:
    if isinstance(answers, Confusion):
        say(
            console,
            f"{name}: rows by class, and the classes predicted{describe_hidden_classes(answers)}",
        )
        rows = [
            [one, *map(str, counts)]
            for one, counts in zip(answers.classes, answers.counts, strict=True)
        ]
        print_cells(console, ["class", *answers.classes], rows, numbers=True)
        return
    say(console, f"{name}: the first predictions of the final test")
    for row in answers[:SAMPLES]:
        print_described(
            console, ["", ""], [[key, " ".join(text.split())] for key, text in row.items()]
        )


def describe_hidden_classes(answers: Confusion) -> str:
    """Return how many classes a confusion matrix does not show, in words; nothing
    if it shows all.
    """
    return (
        f"; {answers.hidden_classes} classes with fewer rows are left out"
        if answers.hidden_classes
        else ""
    )

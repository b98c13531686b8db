"""Many runs as lines over parallel axes: the settings in which they differ, and their metric."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from distcore_workbench.pages.document import color
from distcore_workbench.pages.figures import Figure, plain
from distcore_workbench.report.side_by_side import Facts

FEWEST = 4
"""Runs from which on lines say more than the table."""
WIDE = 50
"""Ratio of the largest to the least positive number from which on an axis is logarithmic."""
BEST, OTHERS = 4, 1.5
"""Width of the best run's line, and of the others', in pixels."""


def settings_figure(facts: Facts) -> Figure | None:
    """Return the figure, with an axis for each setting and one for the first metric.

    ``None`` for a few runs. Runs without that metric, such as unfinished ones, have no line.
    """
    metric, way = next(iter(facts["metrics"].items()), (None, None))
    runs: list[dict[str, Any]] = []
    run_numbers: list[int] = []
    for number, run in enumerate(facts["runs"]):
        if run["metrics"].get(metric) is not None:
            runs.append(run)
            run_numbers.append(number)
    keys = list(dict.fromkeys(key for run in runs for key in run["differs"]))
    if metric is None or len(runs) < FEWEST or not keys:
        return None
    columns = [[run["differs"][key] for run in runs] for key in keys]
    metrics = [run["metrics"][metric] for run in runs]
    columns.append(metrics)
    heights = [_heights(column) for column in columns]
    best = None
    if way:
        best_value = min(metrics) if way == "min" else max(metrics)
        best = metrics.index(best_value)
    names = [*keys, metric]
    lines: list[dict[str, Any]] = []
    for index, (number, run) in enumerate(zip(run_numbers, runs, strict=True)):
        run_name = plain(run["name"])
        texts = []
        for name, column in zip(names, columns, strict=True):
            texts.append(f"{run_name}<br>{plain(name)}: {plain(_text(column[index]))}")
        width = BEST if index == best else OTHERS
        lines.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "run": number,
                "x": list(range(len(names))),
                "y": [heights_of_axis[index] for heights_of_axis in heights],
                "hoverinfo": "text",
                "text": texts,
                "line": {"color": color(number), "width": width},
                "marker": {"color": color(number), "size": 6},
            }
        )
    title = f"Settings and {metric}"
    if way:
        title += ", the best run in bold"
    ends = list(map(_ends, range(len(names)), columns, heights))
    return Figure(
        title=title,
        traces=[*lines, *ends],
        layout={
            "xaxis": {
                "tickvals": list(range(len(names))),
                "range": [-0.5, len(names) - 0.5],
                "fixedrange": True,
                "ticktext": [plain(name.rpartition(".")[2]) for name in names],
                "zeroline": False,
            },
            "yaxis": {"visible": False, "range": [-0.12, 1.12], "fixedrange": True},
        },
    )


def _heights(column: Sequence[Any]) -> list[float]:
    """Return where each value is between the ends of its axis, 0 to 1.

    Values that are not all numbers are in order of appearance; those that are all equal are in
    the middle.
    """
    if all(_is_number(value) for value in column):
        numbers = list(column)
        if min(numbers) > 0 and max(numbers) / min(numbers) >= WIDE:
            numbers = [math.log(value) for value in numbers]
    else:
        order = list(dict.fromkeys(map(_text, column)))
        numbers = [order.index(_text(value)) for value in column]
    low, high = min(numbers), max(numbers)
    if not high > low:  # nor is it above for NaN
        return [0.5] * len(numbers)
    return [(value - low) / (high - low) for value in numbers]


def _is_number(value: object) -> bool:
    """Return True for a number; truth values, which are numbers to Python, are none here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ends(axis: int, column: Sequence[Any], heights: Sequence[float]) -> dict[str, Any]:
    """Return a trace that writes the values at the ends of an axis."""
    text_by_height: dict[float, str] = {}
    for value, height in zip(column, heights, strict=True):
        if height in (0, 0.5, 1):
            text_by_height[height] = _text(value)
    positions = ["bottom center" if height < 1 else "top center" for height in text_by_height]
    return {
        "type": "scatter",
        "mode": "text",
        "x": [axis] * len(text_by_height),
        "y": list(text_by_height),
        "hoverinfo": "skip",
        "text": [plain(text) for text in text_by_height.values()],
        "textposition": positions,
    }


def _text(value: object) -> str:
    """Return a value of a setting or a metric as the figure shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""Many runs as lines over parallel axes: the settings in which they differ,
and what they reached.
"""

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
    """Return the figure, with an axis for each setting and one for the first metric; ``None``
    for a few runs.

    Runs without that metric, such as unfinished ones, have no line.
    """
    metric, way = next(iter(facts["metrics"].items()), (None, None))
    runs = [
        (number, run)
        for number, run in enumerate(facts["runs"])
        if run["metrics"].get(metric) is not None
    ]
    keys = list(dict.fromkeys(key for _, run in runs for key in run["differs"]))
    if metric is None or len(runs) < FEWEST or not keys:
        return None
    columns = [[run["differs"][key] for _, run in runs] for key in keys]
    columns.append([run["metrics"][metric] for _, run in runs])
    places = [_places(column) for column in columns]
    reached = columns[-1]
    best = reached.index({"min": min, "max": max}[way](reached)) if way else None
    names = [*keys, metric]
    lines: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines+markers", "run": number, "x": list(range(len(names))),
            "y": [place[at] for place in places], "hoverinfo": "text",
            "text": [f"{plain(run['name'])}<br>{plain(name)}: {plain(_text(column[at]))}"
                     for name, column in zip(names, columns, strict=True)],
            "line": {"color": color(number), "width": BEST if at == best else OTHERS},
            "marker": {"color": color(number), "size": 6},
        }
        for at, (number, run) in enumerate(runs)
    ]  # fmt: skip
    return Figure(
        title=f"Settings and {metric}" + (", the best run in bold" if way else ""),
        traces=[*lines, *map(_ends, range(len(names)), columns, places)],
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


def _places(column: Sequence[Any]) -> list[float]:
    """Return where each value is between the ends of its axis, 0 to 1; what is no number is
    in order of appearance.
    """
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in column):
        numbers = list(column)
        if min(numbers) > 0 and max(numbers) / min(numbers) >= WIDE:
            numbers = [math.log(value) for value in numbers]
    else:
        order = list(dict.fromkeys(map(_text, column)))
        numbers = [order.index(_text(value)) for value in column]
    low, high = min(numbers), max(numbers)
    return [(value - low) / (high - low) if high > low else 0.5 for value in numbers]


def _ends(axis: int, column: Sequence[Any], places: Sequence[float]) -> dict[str, Any]:
    """Return the values at the ends of an axis, in writing."""
    at = {
        place: _text(value)
        for value, place in zip(column, places, strict=True)
        if place in (0, 0.5, 1)
    }
    return {
        "type": "scatter",
        "mode": "text",
        "x": [axis] * len(at),
        "y": list(at),
        "hoverinfo": "skip",
        "text": [plain(text) for text in at.values()],
        "textposition": ["bottom center" if place < 1 else "top center" for place in at],
    }


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

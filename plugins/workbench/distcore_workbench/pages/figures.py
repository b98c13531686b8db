"""Figures other than curves, as data for plotly.js: bars, ranges, dots on a logarithmic axis.

A string such as ``--a`` is a color of the page's style, in the light or the dark form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

LONGEST_NAME = 24
"""Characters of a name beside a bar; the whole name shows under the pointer."""
ROW, AROUND = 30, 70
"""In pixels: the height of a row, and of the space above and below the rows."""
LEGEND = 30
"""Pixels of a legend above the rows."""
ROOM_FOR_TEXT = 1.3
"""Length of an axis in the longest bar: the rest is for the values in writing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One plot."""

    title: str
    """The heading above it."""
    traces: Sequence[Mapping[str, Any]]
    """Its data, as plotly.js takes it."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Axes and the like, as plotly.js takes them."""

    def as_json(self) -> dict[str, Any]:
        """Return the figure as the page's script reads it."""
        return {"traces": list(self.traces), "layout": dict(self.layout)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One row of bars."""

    name: str
    """The text beside the bar."""
    parts: Sequence[float]
    """The parts of the bar, in the unit of the axis."""
    text: str
    """The text behind the bar."""
    spread: tuple[float, float] | None = None
    """Lowest and highest value of the whole bar."""


def plain(text: str) -> str:
    """Return ``text`` so that plotly.js shows it as it is: no part of it is markup."""
    return escape(text, quote=False)


def bars(title: str, unit: str, parts: Mapping[str, str], rows: Sequence[Bar]) -> Figure:
    """Return one stacked bar per row; ``parts`` maps the name of each part to its color."""
    names = [plain(row.name) for row in rows]
    traces: list[dict[str, Any]] = []
    for index, (part, color) in enumerate(parts.items()):
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "marker": {"color": color},
                "y": list(range(len(rows))),
                "x": [row.parts[index] for row in rows],
                "customdata": names,
                "hovertemplate": f"%{{customdata}}<br>{part}: %{{x:.4~g}} {unit}<extra></extra>",
            }
        )
    lengths = [sum(row.parts) for row in rows]
    spreads = []
    ends = []
    for row, length in zip(rows, lengths, strict=True):
        low, high = row.spread or (length, length)
        spreads.append((low, high))
        ends.append(max(length, high))
    # A single round has no range.
    if any(low < high for low, high in spreads):
        traces[-1]["error_x"] = _errors(lengths, spreads)
    axis = {"title": unit, "range": [0, ROOM_FOR_TEXT * (max(ends) or 1)]}
    layout = _layout(rows, unit, legend=len(parts) > 1)
    return Figure(
        title=title,
        traces=[*traces, _texts(ends, [row.text for row in rows])],
        layout=layout | {"barmode": "stack", "xaxis": axis},
    )


def ranges(title: str, unit: str, rows: Sequence[Bar]) -> Figure:
    """Return one dot per row, the first of its parts, and a line over its range."""
    middles = [row.parts[0] for row in rows]
    spreads = []
    for row, middle in zip(rows, middles, strict=True):
        spreads.append(row.spread or (middle, middle))
    dots = _dots(middles, rows) | {"error_x": _errors(middles, spreads)}
    ends = [high for _, high in spreads]
    axis = {"title": unit, "range": [0, ROOM_FOR_TEXT * (max(ends) or 1)]}
    return Figure(
        title=title,
        traces=[dots, _texts(ends, [row.text for row in rows])],
        layout=_layout(rows, unit) | {"xaxis": axis},
    )


def log_dots(title: str, unit: str, rows: Sequence[Bar]) -> Figure:
    """Return one dot per row on a logarithmic axis; a value of 0 is at its left end."""
    values = [row.parts[0] for row in rows]
    logs = [math.log10(value) for value in values if value > 0]
    low, high = -8, 0
    if logs:
        low = math.floor(min(logs)) - 1
        high = math.ceil(max(logs)) + 1
    positions = [value or 10.0**low for value in values]
    axis = {
        "title": unit,
        "type": "log",
        "range": [low, high],
        "exponentformat": "power",
        "dtick": 1,
    }
    return Figure(
        title=title,
        traces=[_dots(positions, rows), _texts(positions, [row.text for row in rows])],
        layout=_layout(rows, unit) | {"xaxis": axis},
    )


def _dots(positions: Sequence[float], rows: Sequence[Bar]) -> dict[str, Any]:
    """Return a trace with a dot for each row, described under the pointer."""
    return {
        "type": "scatter",
        "mode": "markers",
        "marker": {"color": "--a", "size": 10},
        "x": list(positions),
        "y": list(range(len(rows))),
        "text": [_described(row) for row in rows],
        "hoverinfo": "text",
        "cliponaxis": False,
    }


def _described(row: Bar) -> str:
    """Return name, text and range of a row, as plotly.js takes them."""
    text = f"{row.name}: {row.text}"
    if row.spread:
        low, high = row.spread
        text += f" ({low:.4g} … {high:.4g})"
    return plain(text)


def _texts(positions: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    """Return a trace that writes a text to the right of each position."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": list(positions),
        "y": list(range(len(positions))),
        "hoverinfo": "skip",
        "text": [f"   {plain(text)}" for text in texts],
        "textposition": "middle right",
        "showlegend": False,
    }


def _errors(middles: Sequence[float], spreads: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the error bars of dots or bars, from the low to the high end of each spread."""
    above = []
    below = []
    for middle, (low, high) in zip(middles, spreads, strict=True):
        above.append(high - middle)
        below.append(middle - low)
    return {
        "type": "data",
        "symmetric": False,
        "color": "--ink",
        "thickness": 1.2,
        "width": 4,
        "array": above,
        "arrayminus": below,
    }


def _layout(rows: Sequence[Bar], unit: str, legend: bool = False) -> dict[str, Any]:
    """Return the layout of a figure with its rows below each other, the first on top."""
    names = []
    for row in rows:
        is_short = len(row.name) <= LONGEST_NAME
        names.append(row.name if is_short else f"{row.name[: LONGEST_NAME - 1]}…")
    return {
        "height": AROUND + LEGEND * legend + ROW * len(rows),
        "showlegend": legend,
        "yaxis": {
            "tickvals": list(range(len(rows))),
            "ticktext": [f"{plain(name)} " for name in names],
            "range": [len(rows) - 0.5, -0.5],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
        },
    }

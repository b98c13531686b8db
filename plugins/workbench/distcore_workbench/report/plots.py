"""Plots as inline SVG: stacked bars, ranges with a dot, dots on a logarithmic axis. One row of a plot per strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LABELS, WIDTH, ROW, BAR = 190, 760, 26, 16
"""In pixels: width of the column of names, width of the whole plot, distance between rows, height of a bar."""
VALUES = 150
"""Pixels to the right of the axis area, for the values in writing."""
PLOT = WIDTH - LABELS - VALUES
"""Pixels of the axis area."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a stacked bar."""

    value: float
    """Its length, in the unit of the plot."""
    color: str
    """A class of the page's style."""
    what: str
    """Text of the tooltip."""


def bars(rows: Sequence[tuple[str, list[Part], tuple[float, float] | None, str]]) -> str:
    """Return one stacked bar per row. A row: name, parts, (low, high) of the whole bar if there is a range, text."""
    longest = max([sum(part.value for part in parts) for _, parts, _, _ in rows] + [s[1] for _, _, s, _ in rows if s])
    drawn = []
    for index, (name, parts, spread, text) in enumerate(rows):
        end, y = 0.0, index * ROW + (ROW - BAR) / 2
        drawn.append(_name(index, name))
        for part in parts:
            drawn.append(
                f'<rect class="{part.color}" x="{_x(end, longest):.1f}" y="{y:.1f}" '
                f'width="{part.value / longest * PLOT:.1f}" height="{BAR}"><title>{escape(part.what)}</title></rect>'
            )
            end += part.value
        if spread and spread[0] < spread[1]:  # a single round has no range
            drawn.append(_whisker(index, _x(spread[0], longest), _x(spread[1], longest)))
        drawn.append(_text(index, max(_x(end, longest), _x(spread[1], longest) if spread else 0) + 6, text))
    return _svg(len(rows), drawn)


def ranges(rows: Sequence[tuple[str, float, float, float, str]]) -> str:
    """Return one line per row from low to high, with a dot between them. A row: name, low, middle, high, text."""
    longest = max(high for _, _, _, high, _ in rows)
    drawn = []
    for index, (name, low, middle, high, text) in enumerate(rows):
        drawn += [_name(index, name), _whisker(index, _x(low, longest), _x(high, longest))]
        drawn += [_dot(index, _x(middle, longest), text), _text(index, _x(high, longest) + 8, text)]
    return _svg(len(rows), drawn)


def log_dots(rows: Sequence[tuple[str, float, str]]) -> str:
    """Return one dot per row on a logarithmic axis. A row: name, value, text; a value of 0 is at the left edge."""
    logs = [math.log10(value) for _, value, _ in rows if value > 0]
    low, high = (math.floor(min(logs)) - 1, math.ceil(max(logs)) + 1) if logs else (-8, 0)
    drawn = [
        _tick(len(rows), LABELS + (power - low) / (high - low) * PLOT, f"1e{power}") for power in range(low, high + 1)
    ]
    for index, (name, value, text) in enumerate(rows):
        x = LABELS + (math.log10(value) - low) / (high - low) * PLOT if value > 0 else LABELS
        drawn += [_name(index, name), _dot(index, x, text), _text(index, x + 8, text)]
    return _svg(len(rows), drawn, below=18)


def _svg(rows: int, drawn: Sequence[str], below: int = 0) -> str:
    height = rows * ROW + below
    axis = f'<line class="axis" x1="{LABELS}" x2="{LABELS}" y1="0" y2="{rows * ROW}"/>'
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(drawn)}{axis}</svg>'


def _x(value: float, longest: float) -> float:
    """Return the x coordinate of ``value`` on a linear axis that ends at ``longest``."""
    return LABELS + value / (longest or 1.0) * PLOT


def _middle(index: int) -> float:
    return index * ROW + ROW / 2


def _name(index: int, name: str) -> str:
    short = name if len(name) <= 26 else f"{name[:25]}…"
    where = f'x="{LABELS - 8}" y="{_middle(index) + 4:.1f}"'
    return f'<text class="name" {where}>{escape(short)}<title>{escape(name)}</title></text>'


def _text(index: int, x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{_middle(index) + 4:.1f}">{escape(text)}</text>'


def _dot(index: int, x: float, text: str) -> str:
    return f'<circle class="dot" cx="{x:.1f}" cy="{_middle(index):.1f}" r="5"><title>{escape(text)}</title></circle>'


def _whisker(index: int, left: float, right: float) -> str:
    y = _middle(index)
    ends = "".join(f"M{x:.1f} {y - 4:.1f}v8" for x in (left, right))
    return f'<path class="whisker" d="M{left:.1f} {y:.1f}H{right:.1f}{ends}"/>'


def _tick(rows: int, x: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{rows * ROW}"/>'
        f'<text class="tick" x="{x:.1f}" y="{rows * ROW + 14}">{text}</text>'
    )

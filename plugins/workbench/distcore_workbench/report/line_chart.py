"""A chart of curves as inline SVG: steps to the right, values upwards, both linear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from distcore_workbench.report.curves import Chart, Curve
from distcore_workbench.report.report_page import COLOURS

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BELOW = 760, 220, 70, 30, 8, 24
"""In pixels: the whole picture, and the margins around the area of the curves."""
TICKS = 5
"""Lines of the grid, roughly, in each direction."""
MOST_POINTS = 500
"""Points of a curve; of more, neighbors are joined to their mean."""
MOST_DOTS = 60
"""Points of a curve up to which each has a dot that shows its value."""


def line_chart(chart: Chart, names: Sequence[str]) -> str:
    """Return the chart as SVG; ``names`` are those of the runs. Evaluations are dashed beside a curve of training."""
    curves = [thinned(curve.points) for curve in chart.curves]
    steps = [step for points in curves for step, _ in points]
    values = [value for points in curves for _, value in points]
    x = _Axis(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    y = _Axis(min(values), max(values), HEIGHT - BELOW, TOP)
    drawn = [_grid(x, y)]
    for curve, points in zip(chart.curves, curves, strict=True):
        beside = curve.group == "eval" and any(it.run == curve.run and it.group != "eval" for it in chart.curves)
        drawn.append(_curve(curve, points, (x, y), beside, names[curve.run]))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(drawn)}</svg>'


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Return at most ``MOST_POINTS``: the means of neighbors, or the points themselves if there are no more."""
    if len(points) <= MOST_POINTS:
        return list(points)
    cuts = [len(points) * index // MOST_POINTS for index in range(MOST_POINTS + 1)]
    return [_mean(points[start:end]) for start, end in pairwise(cuts)]


def short(value: float) -> str:
    """Return a number in four digits, as a reader of an axis wants it."""
    return f"{value:.4g}"


class _Axis:
    """A linear scale from values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if low == high:
            low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
        self.low, self.high, self._start, self._end = low, high, start, end

    def __call__(self, value: float) -> float:
        return self._start + (value - self.low) / (self.high - self.low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return round values inside the axis."""
        rough = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first, last = math.ceil(self.low / distance), math.floor(self.high / distance)
        return [index * distance for index in range(first, last + 1)]


def _mean(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)


def _grid(x: _Axis, y: _Axis) -> str:
    bottom, right = HEIGHT - BELOW, WIDTH - RIGHT
    drawn = []
    for value in y.ticks():
        at = f"{y(value):.1f}"
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        drawn.append(f'<text class="scale" x="{LEFT - 8}" y="{y(value) + 4:.1f}">{short(value)}</text>')
    for value in filter(float.is_integer, map(float, x.ticks())):
        drawn.append(f'<text class="tick" x="{x(value):.1f}" y="{HEIGHT - 8}">{value:.0f}</text>')
    return "".join(drawn) + f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'


def _curve(
    curve: Curve, points: Sequence[tuple[float, float]], axes: tuple[_Axis, _Axis], dashed: bool, name: str
) -> str:
    x, y = axes
    color = COLOURS[curve.run % len(COLOURS)]
    path = "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in points)
    kind = f"curve {color} dashed" if dashed else f"curve {color}"
    title = escape(f"{name}, {curve.group}")
    drawn = f'<path class="{kind}" d="M{path}"><title>{title}</title></path>'
    for step, value in points if len(points) <= MOST_DOTS else ():
        drawn += (
            f'<circle class="{color}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5">'
            f"<title>{title}, step {step:.0f}: {short(value)}</title></circle>"
        )
    return drawn

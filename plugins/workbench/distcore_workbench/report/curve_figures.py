"""Charts of curves as figures of the page, with the controls that all of them obey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from distcore_workbench.pages.document import COLORS, color
from distcore_workbench.pages.figures import Figure, plain
from distcore_workbench.report.curves import Baseline, Chart, Curve, Point

MOST_POINTS = 500
"""Points of a curve; of more, neighbors are joined to their mean."""
ALL_POINTS = 20_000
"""Points of all curves of a page, so that the file stays small."""
DASHES = ("solid", "dot", "dashdot", "longdash")
"""Styles of lines: runs with the same color differ in them."""
FEW_POINTS = 60
"""Points of a curve up to which each has a dot."""

Axes = list[dict[str, list[float | None]]]
"""Steps, epochs and seconds of the points of curves; curves with the same ones share them."""


class CurveFigures:
    """The figures of charts, and the axes to which their curves refer by number."""

    def __init__(self, charts: Sequence[Chart], names: Sequence[str]) -> None:
        """Take the charts, and the names of the runs."""
        self.axes: Axes = []
        self._numbers: dict[str, int] = {}
        self._names = names
        curve_count = sum(len(chart.curves) for chart in charts)
        points_per_curve = ALL_POINTS // max(1, curve_count)
        self._most_points = min(MOST_POINTS, max(2, points_per_curve))
        self.figures = [self._figure(chart) for chart in charts]

    def _figure(self, chart: Chart) -> Figure:
        """Return the figure of a chart; among both groups, curves of evaluations are dashed."""
        has_both_groups = len({curve.group for curve in chart.curves}) > 1
        traces: list[dict[str, Any]] = []
        for curve in chart.curves:
            is_dashed = curve.group == "eval" and has_both_groups
            traces.append(self._trace(curve, is_dashed))
        traces += [self._baseline(baseline) for baseline in chart.baselines]
        title = f"{chart.title} (evaluations: dashed)" if has_both_groups else chart.title
        layout = {"yaxis": {"title": plain(chart.title)}}
        return Figure(title=title, traces=traces, layout=layout)

    def _trace(self, curve: Curve, is_dashed: bool) -> dict[str, Any]:
        """Return a curve as plotly.js and the page's script take it."""
        points = thinned(curve.points, self._most_points)
        name = self._names[curve.run]
        if is_dashed:
            name += ", evaluation"
            dash = "dash"
        else:
            dash = DASHES[curve.run // len(COLORS) % len(DASHES)]
        return {
            "type": "scatter",
            "mode": "lines+markers" if len(points) <= FEW_POINTS else "lines",
            "run": curve.run,
            "axis": self._axis(points),
            "y": [rounded(point.value) for point in points],
            "smooth": curve.group == "train",
            "name": plain(name),
            "line": {"color": color(curve.run), "width": 1.8, "dash": dash},
            "marker": {"color": color(curve.run), "size": 5},
            "hovertemplate": "%{y:.4~g}",
        }

    def _baseline(self, baseline: Baseline) -> dict[str, Any]:
        """Return a dotted line with its name, in the color of its run, if it is of one."""
        if baseline.run is None:
            line_color = "--soft"
            name = baseline.name
        else:
            line_color = color(baseline.run)
            name = f"{baseline.name}, {self._names[baseline.run]}"
        return {
            "type": "scatter",
            "mode": "lines+text",
            "run": baseline.run,
            "constant": baseline.value,
            "hoverinfo": "skip",
            "text": ["", plain(f"{name} {baseline.value:.4g}")],
            "textposition": "top left",
            "textfont": {"color": line_color},
            "line": {"color": line_color, "width": 1.2, "dash": "dot"},
        }

    def _axis(self, points: Sequence[Point]) -> int:
        """Return the number of the axis with these points."""
        axis = {
            "step": [rounded(point.step) for point in points],
            "epoch": [rounded(point.epoch) for point in points],
            "seconds": [rounded(point.seconds) for point in points],
        }
        number = self._numbers.setdefault(repr(axis), len(self.axes))
        if number == len(self.axes):
            self.axes.append(axis)
        return number


def controls(names: Sequence[str]) -> str:
    """Return the legend, which switches runs on and off, and the controls of all curves: HTML."""
    runs = "".join(
        f'<button type="button" data-run="{run}" aria-pressed="true">'
        f'<i style="background: var({color(run)})"></i>{escape(name)}</button>'
        for run, name in enumerate(names)
    )
    return (
        f'<div class="controls"><div class="runs">{runs}</div><label>x axis <select'
        ' id="axis"><option value="step">step</option><option value="epoch">epoch</option><option'
        ' value="seconds">time</option></select></label><label>smoothing <input id="smoothing"'
        ' type="range" min="0" max="0.98" step="0.02" value="0"> <output'
        ' id="smoothed">0.00</output></label></div>\n'
    )


def thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most ``most`` points: the means of neighbors, or all points if these are few."""
    if len(points) <= most:
        return points
    cuts = [len(points) * index // most for index in range(most + 1)]
    return [_mean(points[start:end]) for start, end in pairwise(cuts)]


def _mean(points: Sequence[Point]) -> Point:
    """Return the point in the middle of several, each of its coordinates a mean."""
    step, epoch, seconds, value = map(_mean_of, zip(*points, strict=True))
    return Point(step, epoch, seconds, value)  # type: ignore[arg-type]


def _mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean; ``None`` if one of the values is ``None``."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return None
    return sum(numbers) / len(numbers)


def rounded(value: float | None) -> float | None:
    """Return a number in six digits, of which a plot shows no more; whole ones stay whole."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None

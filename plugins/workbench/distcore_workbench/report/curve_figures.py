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
"""Runs with the same color have lines of their own."""
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
        self._most = min(
            MOST_POINTS, max(2, ALL_POINTS // max(1, sum(len(chart.curves) for chart in charts)))
        )
        self.figures = [self._figure(chart) for chart in charts]

    def _figure(self, chart: Chart) -> Figure:
        of_evaluation = len({curve.group for curve in chart.curves}) > 1
        traces: list[dict[str, Any]] = []
        for curve in chart.curves:
            is_beside = curve.group == "eval" and of_evaluation
            traces.append(self._trace(curve, is_beside))
        traces += [self._baseline(one) for one in chart.baselines]
        title = f"{chart.title} (evaluations: dashed)" if of_evaluation else chart.title
        return Figure(title=title, traces=traces, layout={"yaxis": {"title": plain(chart.title)}})

    def _trace(self, curve: Curve, is_beside: bool) -> dict[str, Any]:
        points = thinned(curve.points, self._most)
        name = self._names[curve.run] + (", evaluation" if is_beside else "")
        dash = "dash" if is_beside else DASHES[curve.run // len(COLORS) % len(DASHES)]
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

    def _baseline(self, one: Baseline) -> dict[str, Any]:
        ink = "--soft" if one.run is None else color(one.run)
        of_run = "" if one.run is None else f", {self._names[one.run]}"
        return {
            "type": "scatter",
            "mode": "lines+text",
            "run": one.run,
            "constant": one.value,
            "hoverinfo": "skip",
            "text": ["", plain(f"{one.name}{of_run} {one.value:.4g}")],
            "textposition": "top left",
            "textfont": {"color": ink},
            "line": {"color": ink, "width": 1.2, "dash": "dot"},
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
    """Return the legend, which switches runs on and off, and the choices for
    all curves, as HTML.
    """
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
    """Return at most ``most`` points: the means of neighbors, or the points themselves if
    there are no more.
    """
    if len(points) <= most:
        return points
    cuts = [len(points) * index // most for index in range(most + 1)]
    return [_mean(points[start:end]) for start, end in pairwise(cuts)]


def _mean(points: Sequence[Point]) -> Point:
    step, epoch, seconds, value = map(_mean_of, zip(*points, strict=True))
    return Point(step, epoch, seconds, value)  # type: ignore[arg-type]


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def rounded(value: float | None) -> float | None:
    """Return a number in six digits, which a plot cannot tell from the number itself;
    whole ones stay whole.
    """
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None

"""Curves of runs: the values in ``metrics.jsonl``, grouped into charts with a title each."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from distcore import ConfigError, RunConfig
from distcore_workbench.report.side_by_side import COUNTS

FIRST = ("loss",)
"""The chart above those of the metrics."""
TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "model_flops": "model TFLOP per step",
    "mfu": "MFU",
    "peak_memory_bytes": "peak memory, MiB",
    "peak_memory_max_bytes": "peak memory of all ranks, MiB",
}
"""Names of charts that are no metrics, in their order below these."""
UNITS = {"model_flops": 10**12, "peak_memory_bytes": 2**20, "peak_memory_max_bytes": 2**20}
"""The divisor of a chart's values."""
BASELINES = ("majority_", "baseline_", "lookup_")
"""Beginnings of the names of baselines; the rest of the name is the metric to compare with."""


class Point(NamedTuple):
    """A value, and how far the run was."""

    step: int
    """Optimizer steps."""
    epoch: float | None
    """Passes over the training data; ``None`` if they are not known."""
    seconds: float | None
    """Training time, without evaluations and checkpoints; ``None`` if it is not known."""
    value: float
    """In the unit of the chart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The values of one name in one run."""

    run: int
    """Number of the run, from 0."""
    group: str
    """``train`` or ``eval``."""
    points: tuple[Point, ...]
    """By step; at least one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A constant to compare curves with, such as the accuracy of the most frequent class."""

    name: str
    """Its words, such as ``majority accuracy``."""
    run: int | None
    """Number of the run; ``None`` if it is the same for all runs."""
    value: float
    """In the unit of the chart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves that share their axes."""

    title: str
    """The name of the values."""
    curves: tuple[Curve, ...]
    """One per run. For a single run, the training curve comes first."""
    baselines: tuple[Baseline, ...] = ()
    """Constants to compare the curves with."""

    @property
    def is_of_results(self) -> bool:
        """True for the loss, and for what evaluations measure."""
        is_evaluated = any(curve.group == "eval" for curve in self.curves)
        return is_evaluated or self.title == "loss"


def lines_of(folder: Path, config: RunConfig) -> list[dict[str, Any]]:
    """Return the lines of a run's ``metrics.jsonl`` by step; none if it has no step yet.

    A last line without its end is left out: a run that goes on is writing it, or one that was
    killed did. Raises ConfigError, which names file and line, for a line that is damaged.
    """
    options = config.extensions.get("metrics")
    file_name = "metrics.jsonl"
    if isinstance(options, dict):
        file_name = str(options.get("file", file_name))
    file = folder / file_name
    try:
        texts = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if texts and not texts[-1].endswith("\n"):
        texts.pop()
    lines = [_parsed(file, number, text) for number, text in enumerate(texts, 1)]
    return sorted(lines, key=lambda line: line["step"])


def _parsed(file: Path, number: int, text: str) -> dict[str, Any]:
    """Return line ``number`` of a file; raises ConfigError unless it is an object with a step."""
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        raise ConfigError(
            f"{file}, line {number}: damaged, expected a JSON object with a step:"
            f" {text.strip()[:60]!r}"
        )
    return line


def charts_of(
    runs: Sequence[Sequence[Mapping[str, Any]]],
    data: Sequence[Mapping[str, Any]] = (),
) -> list[Chart]:
    """Return the charts of the runs, each run given by its lines.

    They are in the order of loss, metrics, then rates, norms, speed and memory. ``data``, by run,
    are facts of the evaluation data; baselines are among them, too.
    """
    series = _series_of(runs)
    values_by_name: dict[str, dict[int, float]] = {}
    for name, curves in series.items():
        last_values = {run: points[-1].value for (run, _), points in curves.items()}
        values_by_name[name] = last_values
    for run, facts in enumerate(data):
        for name, value in facts.items():
            if _is_number(value):
                values_by_name.setdefault(name, {})[run] = value
    baselines: dict[str, list[Baseline]] = {}
    baseline_names = set()
    for name, values in values_by_name.items():
        metric = _compared_with(name)
        if metric in series:
            baseline_names.add(name)
            baselines.setdefault(metric, []).extend(_baselines(name, values, len(runs)))
    evaluated = set()
    for name, curves in series.items():
        if any(group == "eval" for _, group in curves):
            evaluated.add(name)
    metrics = [name for name in series if name in evaluated - {*FIRST} - baseline_names]
    others = [name for name in series if name not in {*FIRST, *TITLES} | evaluated]
    charts = []
    for name in (*FIRST, *metrics, *TITLES, *others):
        if name in series:
            charts.append(_chart(name, series[name], baselines.get(name, [])))
    return charts


def _series_of(
    runs: Sequence[Sequence[Mapping[str, Any]]],
) -> dict[str, dict[tuple[int, str], list[Point]]]:
    """Return the points in the lines of all runs, by name, then by number of the run and group."""
    series: dict[str, dict[tuple[int, str], list[Point]]] = {}
    for run, lines in enumerate(runs):
        for line, seconds in zip(lines, training_seconds(lines), strict=True):
            for group, name, value in _values(line):
                value_in_unit = value / UNITS.get(name, 1)
                point = Point(line["step"], line.get("epoch"), seconds, value_in_unit)
                curves = series.setdefault(name, {})
                curves.setdefault((run, group), []).append(point)
    return series


def training_seconds(lines: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the training time until each line: the sum of its samples by their speed.

    ``None`` where that is unknown.
    """
    sample_counts = [0.0]
    times = [0.0]
    for line in lines:
        samples = line.get("samples")
        speed = line.get("train/samples_per_second")
        if not (_is_number(samples) and _is_number(speed)):
            continue
        new_samples = samples - sample_counts[-1]
        if speed > 0 and new_samples > 0:
            times.append(times[-1] + new_samples / speed)
            sample_counts.append(samples)
    return [_time_at(line.get("samples"), sample_counts, times) for line in lines]


def _time_at(samples: Any, sample_counts: Sequence[float], times: Sequence[float]) -> float | None:
    """Return the time at which a run had seen ``samples``, between two known times by their ratio.

    After the last known time it is that one; ``None`` if no time is known.
    """
    if not _is_number(samples) or len(sample_counts) == 1:
        return None
    after = bisect_left(sample_counts, samples)
    if after == 0 or after == len(sample_counts):
        return times[min(after, len(sample_counts) - 1)]
    before = after - 1
    new_samples = samples - sample_counts[before]
    share = new_samples / (sample_counts[after] - sample_counts[before])
    return times[before] + share * (times[after] - times[before])


def _is_number(value: object) -> TypeGuard[float]:
    """Return True for a finite number; truth values, which are numbers to Python, are none here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _values(line: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield group, name and value of every number that is finite, without counts."""
    for key, value in line.items():
        group, _, name = key.partition("/")
        is_count = group == "eval" and name in COUNTS
        if name and _is_number(value) and not is_count:
            yield group, name, value


def _compared_with(name: str) -> str | None:
    """Return the metric that ``name`` is a baseline of."""
    evaluation_set, slash, last = name.rpartition("/")
    for start in BASELINES:
        if last.startswith(start):
            return f"{evaluation_set}{slash}{last.removeprefix(start)}"
    return None


def _baselines(name: str, values: Mapping[int, float], runs: int) -> list[Baseline]:
    """Return one baseline if all runs have the same, else one of each run."""
    title = name.replace("_", " ")
    distinct_values = set(values.values())
    if len(distinct_values) == 1 and len(values) == runs:
        (value,) = distinct_values
        return [Baseline(name=title, run=None, value=value)]
    return [Baseline(name=title, run=run, value=value) for run, value in values.items()]


def _chart(
    name: str,
    series: Mapping[tuple[int, str], Sequence[Point]],
    baselines: Sequence[Baseline],
) -> Chart:
    """Return the chart of one name: by run, its training curve before that of its evaluations."""

    def order(key: tuple[int, str]) -> tuple[int, bool]:
        run, group = key
        return run, group == "eval"

    curves = []
    for run, group in sorted(series, key=order):
        points = tuple(series[run, group])
        curves.append(Curve(run=run, group=group, points=points))
    return Chart(
        title=TITLES.get(name, name.replace("_", " ")),
        curves=tuple(curves),
        baselines=tuple(baselines),
    )

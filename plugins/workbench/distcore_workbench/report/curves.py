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
    """A constant to compare curves with, such as the accuracy of always predicting
    the most frequent class.
    """

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


def lines_of(folder: Path, config: RunConfig) -> list[dict[str, Any]]:
    """Return the lines of a run's ``metrics.jsonl`` by step; none if it has no step yet.

    A last line without its end is left out: a run that goes on is writing it, or one that was
    killed did. Raises ConfigError, which names file and line, for a line that is damaged.
    """
    options = config.extensions.get("metrics")
    file = folder / str(
        options.get("file", "metrics.jsonl") if isinstance(options, dict) else "metrics.jsonl"
    )
    try:
        texts = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if texts and not texts[-1].endswith("\n"):
        texts.pop()
    return sorted(
        (_parsed(file, number, text) for number, text in enumerate(texts, 1)),
        key=lambda line: line["step"],
    )


def _parsed(file: Path, number: int, text: str) -> dict[str, Any]:
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
    runs: Sequence[Sequence[Mapping[str, Any]]], data: Sequence[Mapping[str, Any]] = ()
) -> list[Chart]:
    """Return the charts of the runs, each given by its lines: loss, metrics, then rates,
    norms, speed and memory.

    ``data``, by run: facts of the evaluation data, among which are baselines, too.
    """
    series: dict[str, dict[tuple[int, str], list[Point]]] = {}
    for run, lines in enumerate(runs):
        for line, seconds in zip(lines, training_seconds(lines), strict=True):
            for group, name, value in _values(line):
                point = Point(line["step"], line.get("epoch"), seconds, value / UNITS.get(name, 1))
                series.setdefault(name, {}).setdefault((run, group), []).append(point)
    constants = {
        name: {run: points[-1].value for (run, _), points in series[name].items()}
        for name in series
    }
    for run, facts in enumerate(data):
        for name, value in facts.items():
            if _is_number(value):
                constants.setdefault(name, {})[run] = value
    baselines = {
        name: values for name, values in constants.items() if _compared_with(name) in series
    }
    of_training = [name for name in series if not any(group == "eval" for _, group in series[name])]
    metrics = [name for name in series if name not in (*FIRST, *of_training, *baselines)]
    others = [name for name in of_training if name not in (*FIRST, *TITLES)]
    return [
        _chart(
            name,
            series[name],
            [
                line
                for other, values in baselines.items()
                if _compared_with(other) == name
                for line in _baselines(other, values, len(runs))
            ],
        )
        for name in (*FIRST, *metrics, *TITLES, *others)
        if name in series
    ]


def training_seconds(lines: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the training time until each line: the sum of its samples by their speed; ``None``
    if that is unknown.
    """
    counts, times = [0.0], [0.0]
    for line in lines:
        samples, speed = line.get("samples"), line.get("train/samples_per_second")
        if _is_number(samples) and _is_number(speed) and speed > 0 and samples > counts[-1]:
            times.append(times[-1] + (samples - counts[-1]) / speed)
            counts.append(samples)
    return [_time_at(line.get("samples"), counts, times) for line in lines]


def _time_at(samples: Any, counts: Sequence[float], times: Sequence[float]) -> float | None:
    """Return the time at a number of samples; after the last known one the time stands still."""
    if not _is_number(samples) or len(counts) == 1:
        return None
    after = bisect_left(counts, samples)
    if after == 0 or after == len(counts):
        return times[min(after, len(counts) - 1)]
    share = (samples - counts[after - 1]) / (counts[after] - counts[after - 1])
    return times[after - 1] + share * (times[after] - times[after - 1])


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _values(line: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield group, name and value of every number that is finite; null stands for others."""
    for key, value in line.items():
        group, _, name = key.partition("/")
        if name and _is_number(value) and not (group == "eval" and name in COUNTS):
            yield group, name, value


def _compared_with(name: str) -> str | None:
    """Return the metric that ``name`` is a baseline of."""
    of, slash, last = name.rpartition("/")
    return next(
        (f"{of}{slash}{last.removeprefix(start)}" for start in BASELINES if last.startswith(start)),
        None,
    )


def _baselines(name: str, values: Mapping[int, float], runs: int) -> list[Baseline]:
    """Return one baseline if all runs have the same, else one of each run."""
    title = name.replace("_", " ")
    if len(set(values.values())) == 1 and len(values) == runs:
        return [Baseline(name=title, run=None, value=next(iter(values.values())))]
    return [Baseline(name=title, run=run, value=value) for run, value in values.items()]


def _chart(
    name: str, series: Mapping[tuple[int, str], Sequence[Point]], baselines: Sequence[Baseline]
) -> Chart:
    ordered = sorted(series, key=lambda key: (key[0], key[1] == "eval"))
    curves = [
        Curve(run=run, group=group, points=tuple(series[run, group])) for run, group in ordered
    ]
    return Chart(
        title=TITLES.get(name, name.replace("_", " ")),
        curves=tuple(curves),
        baselines=tuple(baselines),
    )

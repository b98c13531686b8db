"""Curves of runs: what ``metrics.jsonl`` holds, grouped into charts with a title each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore import ConfigError, RunConfig
from distcore_workbench.report.side_by_side import COUNTS

FIRST = ("loss",)
"""The chart above those of the metrics."""
TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "samples_per_second": "samples/s",
    "peak_memory_bytes": "peak memory, MiB",
}
"""Names of charts that are no metrics, in their order below these."""
UNITS = {"peak_memory_bytes": 2**20}
"""The divisor of a chart's values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The values of one name in one run."""

    run: int
    """Number of the run, from 0."""
    group: str
    """``train`` or ``eval``."""
    points: tuple[tuple[int, float], ...]
    """Step and value, by step; at least one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves that share their axes."""

    title: str
    """What the values are."""
    curves: tuple[Curve, ...]
    """By run; of one run that of training first."""


def lines_of(folder: Path, config: RunConfig) -> list[dict[str, Any]]:
    """Return the lines of a run's ``metrics.jsonl`` by step; none if it has no step yet.

    A last line without its end is left out: a run that goes on is writing it, or one that was killed did. Raises
    ConfigError, which names file and line, for what is no line of metrics.
    """
    options = config.extensions.get("metrics")
    file = folder / str(options.get("file", "metrics.jsonl") if isinstance(options, dict) else "metrics.jsonl")
    try:
        texts = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if texts and not texts[-1].endswith("\n"):
        texts.pop()
    return sorted((_parsed(file, number, text) for number, text in enumerate(texts, 1)), key=lambda line: line["step"])


def _parsed(file: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        raise ConfigError(f"{file}, line {number}: damaged, expected a JSON object with a step: {text.strip()[:60]!r}")
    return line


def charts_of(runs: Sequence[Iterable[Mapping[str, Any]]]) -> list[Chart]:
    """Return the charts of the runs, each given by its lines: loss, metrics, then what says how training went."""
    series: dict[str, dict[tuple[int, str], list[tuple[int, float]]]] = {}
    for run, lines in enumerate(runs):
        for step, group, name, value in _values(lines):
            series.setdefault(name, {}).setdefault((run, group), []).append((step, value / UNITS.get(name, 1)))
    of_training = [name for name in series if not any(group == "eval" for _, group in series[name])]
    metrics = [name for name in series if name not in (*FIRST, *of_training)]
    others = [name for name in of_training if name not in (*FIRST, *TITLES)]
    order = (*FIRST, *metrics, *TITLES, *others)
    return [_chart(name, series[name]) for name in order if name in series]


def _values(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, str, str, float]]:
    """Yield step, group, name and value of every number that is finite; null stands for others."""
    for line in lines:
        for key, value in line.items():
            group, _, name = key.partition("/")
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if name and is_number and not (group == "eval" and name in COUNTS):
                yield line["step"], group, name, value


def _chart(name: str, series: Mapping[tuple[int, str], list[tuple[int, float]]]) -> Chart:
    ordered = sorted(series, key=lambda key: (key[0], key[1] == "eval"))
    curves = [Curve(run=run, group=group, points=tuple(series[run, group])) for run, group in ordered]
    return Chart(title=TITLES.get(name, name.replace("_", " ")), curves=tuple(curves))

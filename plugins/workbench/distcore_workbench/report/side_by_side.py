"""Runs side by side: the metrics that they reached, their speed and memory, and
where their configs differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from distcore.files import strict_json
from distcore_workbench.report.folders import RunFolder, names_of

Facts = dict[str, Any]
"""JSON values by name."""
Cell = Callable[[Facts], str]
"""Turns the facts of a row into the text of one cell."""
VERSION = 1
"""Version of the format of compare.json for runs."""
NOT_AVAILABLE = "n/a"
ARROWS = {"min": " ↓", "max": " ↑", None: ""}
"""Follows the name of a metric: less is better, more is better, not known."""
BEST = " *"
"""Follows the best value of a metric."""
COUNTS = ("evaluated", "unique", "dataset_size")
"""Numbers of an evaluation that are no metrics."""


def facts_of(runs: Sequence[RunFolder], command: str) -> Facts:
    """Return the runs as JSON values: the content of compare.json. ``command``
    is the command line.
    """
    names = names_of([one.folder for one in runs])
    directions: dict[str, str | None] = {
        name: way for one in runs for name, way in named_metrics(one.report).items()
    }
    if not directions:  # of a task that declares none, or of an earlier version
        directions = dict.fromkeys(name for one in runs for name in _metrics(one))
    values = [one.values for one in runs]
    keys = dict.fromkeys(key for config in values for key in config)
    differing = [key for key in keys if len({json.dumps(config.get(key)) for config in values}) > 1]
    facts = {
        "version": VERSION,
        "distcore": version("distcore-core"),
        "command": command,
        "metrics": directions,
        "runs": [
            _run_facts(name, one, directions, differing)
            for name, one in zip(names, runs, strict=True)
        ],
        "notes": list(_notes(names, runs)),
    }
    return dict(json.loads(strict_json(facts)))


def named_metrics(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the declared metrics in a report with their direction, those of
    evaluation sets too: ``hard/loss``.
    """
    declared: dict[str, str] = report.get("metrics", {})
    sets = report.get("evaluations", {})
    return declared | {f"{name}/{metric}": way for name in sets for metric, way in declared.items()}


def reached(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the final test, and of the last evaluation of each evaluation set."""
    sets = report.get("evaluations", {}).items()
    of_sets = {
        f"{name}/{metric}": value
        for name, one in sets
        for metric, value in one.items()
        if metric not in COUNTS
    }
    return {**report.get("evaluation", {}), **of_sets}


def headings(facts: Facts) -> list[str]:
    """Return the column headings."""
    return ["run", *_columns(facts)]


def cells(facts: Facts) -> list[list[str]]:
    """Return the cells of each run."""
    return [
        [run["name"], *(cell(run) for cell in _columns(facts).values())] for run in facts["runs"]
    ]


def number(value: float | None, digits: int) -> str:
    """Return ``value`` with so many digits after the point, or that it is not there."""
    return NOT_AVAILABLE if value is None else f"{value:.{digits}f}"


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; all columns but the first are aligned to the right."""
    return "\n".join(
        [_line(names), _line(["---", *["---:"] * (len(names) - 1)]), *map(_line, rows)]
    )


def _line(texts: Sequence[str]) -> str:
    # chr(92) is the backslash, which an f-string of Python 3.11 cannot contain.
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def _columns(facts: Facts) -> dict[str, Cell]:
    """Map each heading after the first to the function that makes its cell."""
    metrics = {
        f"{name}{ARROWS[way]}": partial(_metric, facts, name)
        for name, way in facts["metrics"].items()
    }
    differing = dict.fromkeys(key for run in facts["runs"] for key in run["differs"])
    return {
        **{key: partial(_setting, key) for key in differing},
        **metrics,
        "samples/s": lambda run: number(run["samples_per_second"], 1),
        "training s": lambda run: number(run["train_seconds"], 1),
        "peak MiB/rank": lambda run: number(run["peak_memory_mib"], 0),
    }


def _metric(facts: Facts, name: str, run: Facts) -> str:
    value, way = run["metrics"][name], facts["metrics"][name]
    others = [
        other["metrics"][name] for other in facts["runs"] if other["metrics"][name] is not None
    ]
    is_best = way and len(others) > 1 and value == {"min": min, "max": max}[way](others)
    return f"{number(value, 4)}{BEST if is_best else ''}"


def _setting(key: str, run: Facts) -> str:
    value = run["differs"][key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _run_facts(
    name: str, one: RunFolder, metrics: Mapping[str, object], differing: Sequence[str]
) -> Facts:
    peak, values, config = one.report.get("peak_memory_bytes"), _metrics(one), one.values
    # 0 where a finished run was resumed: no step was made
    speed = one.report.get("samples_per_second") or None
    return {
        "name": name,
        "folder": str(one.folder),
        "finished": bool(one.report),
        "metrics": {metric: values.get(metric) for metric in metrics},
        **{key: one.report.get(key) for key in ("steps", "world_size")},
        "samples_per_second": speed,
        "train_seconds": one.report.get("train_seconds") if speed else None,
        "peak_memory_mib": peak / 2**20 if peak else None,
        "differs": {key: config.get(key) for key in differing},
    }


def _metrics(one: RunFolder) -> dict[str, float]:
    """Return the finite numbers of the final test, and of evaluation sets."""
    return {
        name: value
        for name, value in reached(one.report).items()
        if isinstance(value, float | int) and math.isfinite(value) and name not in COUNTS
    }


def _notes(names: Sequence[str], runs: Sequence[RunFolder]) -> Iterator[str]:
    """Yield warnings for a reader who compares the runs, one line each."""
    rows = {one.report.get("evaluation", {}).get("dataset_size") for one in runs if one.report}
    if len(rows) > 1:
        yield f"tested on different rows: {', '.join(map(str, sorted(rows, key=str)))} of them"
    for name, one in zip(names, runs, strict=True):
        if not one.report:
            yield f"{name}: not finished, it has no report.json"
        elif since := one.report.get("measured_since"):
            yield (
                f"{name}: was resumed at step {since}; its speed, seconds and memory are of the"
                " steps since then"
            )

"""Runs side by side: their metrics, speed and memory, and where their configs differ."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

from distcore.files import strict_json
from distcore_workbench.report.folders import RunFolder, names_of

Facts = dict[str, Any]
"""JSON values by name."""
Cell = Callable[[Facts], str]
"""Turns the facts of a row into the text of one cell."""
Part = Literal["all", "results", "costs"]
"""Columns of the runs: settings and metrics are the results, times and memory the costs."""
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
    """Return the runs as JSON values: the content of compare.json.

    ``command`` is the command line.
    """
    names = names_of([run.folder for run in runs])
    directions: dict[str, str | None] = {}
    for run in runs:
        directions |= named_metrics(run.report)
    if not directions:  # of a task that declares none, or of an earlier version
        directions = dict.fromkeys(name for run in runs for name in _metrics(run))
    differing = _differing_keys([run.values for run in runs])
    run_facts = []
    for name, run in zip(names, runs, strict=True):
        run_facts.append(_run_facts(name, run, directions, differing))
    facts = {
        "version": VERSION,
        "distcore": version("distcore-core"),
        "command": command,
        "metrics": directions,
        "runs": run_facts,
        "notes": list(_notes(names, runs)),
    }
    return dict(json.loads(strict_json(facts)))


def _differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all configs, in order of appearance."""
    differing = []
    for key in dict.fromkeys(key for config in configs for key in config):
        # As JSON, since lists and dicts cannot be members of a set.
        distinct_values = {json.dumps(config.get(key)) for config in configs}
        if len(distinct_values) > 1:
            differing.append(key)
    return differing


def named_metrics(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the declared metrics in a report with their direction.

    Those of evaluation sets are there, too, by names such as ``hard/loss``.
    """
    declared: dict[str, str] = report.get("metrics", {})
    directions = dict(declared)
    for set_name in report.get("evaluations", {}):
        for metric, direction in declared.items():
            directions[f"{set_name}/{metric}"] = direction
    return directions


def reached(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the final test, and of the last evaluation of each evaluation set."""
    values = dict(report.get("evaluation", {}))
    for set_name, evaluation in report.get("evaluations", {}).items():
        for metric, value in evaluation.items():
            if metric not in COUNTS:
                values[f"{set_name}/{metric}"] = value
    return values


def headings(facts: Facts, part: Part = "all") -> list[str]:
    """Return the column headings of a part of the columns."""
    return ["run", *_columns(facts, part)]


def cells(facts: Facts, part: Part = "all") -> list[list[str]]:
    """Return the cells of each run in a part of the columns."""
    columns = _columns(facts, part).values()
    rows = []
    for run in facts["runs"]:
        rows.append([run["name"], *(cell(run) for cell in columns)])
    return rows


def number(value: float | None, digits: int) -> str:
    """Return ``value`` with ``digits`` after the point, or ``n/a`` for ``None``."""
    return NOT_AVAILABLE if value is None else f"{value:.{digits}f}"


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; all columns but the first are aligned to the right."""
    alignment = ["---", *["---:"] * (len(names) - 1)]
    lines = [names, alignment, *rows]
    return "\n".join(map(_line, lines))


def _line(texts: Sequence[str]) -> str:
    """Return a row of a Markdown table; a ``|`` in a text does not begin a cell."""
    escaped = [text.replace("|", r"\|") for text in texts]
    return f"| {' | '.join(escaped)} |"


def _columns(facts: Facts, part: Part) -> dict[str, Cell]:
    """Map each heading after the first to the function that makes its cell."""
    costs: dict[str, Cell] = {
        "samples/s": lambda run: number(run["samples_per_second"], 1),
        "training s": lambda run: number(run["train_seconds"], 1),
        "peak MiB/rank": lambda run: number(run["peak_memory_mib"], 0),
    }
    if part == "costs":
        return costs
    metrics = {
        f"{name}{ARROWS[way]}": partial(_metric, facts, name)
        for name, way in facts["metrics"].items()
    }
    differing = dict.fromkeys(key for run in facts["runs"] for key in run["differs"])
    results: dict[str, Cell] = {key: partial(_setting, key) for key in differing}
    results |= metrics
    return results if part == "results" else results | costs


def _metric(facts: Facts, name: str, run: Facts) -> str:
    """Return the cell of a metric, marked if no run has a better value."""
    value = run["metrics"][name]
    direction = facts["metrics"][name]
    text = number(value, 4)
    values_of_runs = [other["metrics"][name] for other in facts["runs"]]
    values = [other_value for other_value in values_of_runs if other_value is not None]
    # Nothing is best of one, or where the direction is not known.
    if len(values) < 2 or not direction:
        return text
    best = {"min": min, "max": max}[direction](values)
    return f"{text}{BEST}" if value == best else text


def _setting(key: str, run: Facts) -> str:
    """Return the cell of a key in which the configs differ."""
    value = run["differs"][key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _run_facts(
    name: str, run: RunFolder, metrics: Mapping[str, object], differing: Sequence[str]
) -> Facts:
    """Return the facts of one run; those that its report does not have are ``None``."""
    report = run.report
    values = _metrics(run)
    peak = report.get("peak_memory_bytes")
    # 0 where a finished run was resumed: no step was made
    speed = report.get("samples_per_second") or None
    return {
        "name": name,
        "folder": str(run.folder),
        "finished": bool(report),
        "metrics": {metric: values.get(metric) for metric in metrics},
        "steps": report.get("steps"),
        "world_size": report.get("world_size"),
        "samples_per_second": speed,
        "train_seconds": report.get("train_seconds") if speed else None,
        "peak_memory_mib": peak / 2**20 if peak else None,
        "differs": {key: run.values.get(key) for key in differing},
    }


def _metrics(run: RunFolder) -> dict[str, float]:
    """Return the finite numbers of the final test, and of evaluation sets."""
    metrics = {}
    for name, value in reached(run.report).items():
        is_finite_number = isinstance(value, float | int) and math.isfinite(value)
        if is_finite_number and name not in COUNTS:
            metrics[name] = value
    return metrics


def _notes(names: Sequence[str], runs: Sequence[RunFolder]) -> Iterator[str]:
    """Yield warnings for a reader who compares the runs, one line each."""
    reports = [run.report for run in runs if run.report]
    test_sizes = {report.get("evaluation", {}).get("dataset_size") for report in reports}
    if len(test_sizes) > 1:
        sizes = ", ".join(map(str, sorted(test_sizes, key=str)))
        yield f"tested on different rows: {sizes} of them"
    for name, run in zip(names, runs, strict=True):
        if not run.report:
            yield f"{name}: not finished, it has no report.json"
        elif since := run.report.get("measured_since"):
            yield (
                f"{name}: was resumed at step {since}; its speed, seconds and memory are of the"
                " steps since then"
            )

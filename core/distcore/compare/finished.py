"""Runs that are there, side by side: the metrics that they reached, their speed, and where their configs differ."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distcore import __version__
from distcore.compare.comparison import command_line, free_folder, write
from distcore.compare.facts import Facts
from distcore.compare.page import document, html_table, remark_list
from distcore.compare.table import FILE_WIDTH, Cell, markdown_table, number
from distcore.config import flatten, load_config
from distcore.errors import ConfigError
from distcore.files import strict_json
from distcore.tables import print_cells, say, stdout_console

VERSION = 1
"""Version of the format of compare.json for runs."""
TITLE = "Runs compared"
ARROWS = {"min": " ↓", "max": " ↑", None: ""}
"""Follows the name of a metric: less is better, more is better, not known."""
BEST = " *"
"""Follows the best value of a metric."""
COUNTS = ("evaluated", "unique", "dataset_size")
"""Numbers of an evaluation that are no metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A run folder."""

    folder: Path
    """Where it is."""
    config: Mapping[str, Any]
    """Values of its config.yaml, by dotted key."""
    report: Mapping[str, Any]
    """The content of report.json; empty if the run is not finished."""


def run(paths: Sequence[Path], out: str | None) -> int:
    """Print the table and, with ``out``, write it there as a page, Markdown and JSON; return 0. Raises ConfigError."""
    folder = free_folder(out) if out else None
    facts = facts_of([read(path) for path in folders_of(paths)])
    show(facts)
    if folder is not None:
        remarks = list(facts["notes"])
        table = markdown_table(headings(facts), cells(facts))
        page = f"{html_table(headings(facts), cells(facts))}\n{remark_list(remarks)}\n"
        listed = "".join(f"- {line}\n" for line in remarks)
        texts = {
            "json": strict_json(facts, indent=1),
            "md": f"# {TITLE}\n\n`{facts['command']}`\n\n{table}\n\n{listed}",
            "html": document(TITLE, facts["command"], page),
        }
        write(texts, folder)
        print(f"compared: {folder}/compare.html, compare.md, compare.json", flush=True)
    return 0


def folders_of(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders; a folder that is none stands for those inside it. Raises ConfigError if there is none."""
    found: list[Path] = []
    for path in paths:
        inside = [path] if (path / "config.yaml").is_file() else [p.parent for p in sorted(path.glob("*/config.yaml"))]
        if not inside:
            why = "no run folder: it has no config.yaml" if path.is_dir() else "no such folder"
            raise ConfigError(f"compare {path}: {why}; give run folders, or --strategies for a job to run")
        found += inside
    return list(dict.fromkeys(found))


def read(folder: Path) -> Finished:
    """Return what the run folder says of its run; raises ConfigError if that cannot be read."""
    report, file = {}, folder / "report.json"
    if file.is_file():
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from None
    config = load_config(str(folder / "config.yaml"), {})
    return Finished(folder=folder, config=flatten(config.model_dump(mode="json")), report=report)


def facts_of(runs: Sequence[Finished]) -> Facts:
    """Return the comparison as JSON values: the content of compare.json."""
    names = _names(runs)
    directions = {name: way for one in runs for name, way in one.report.get("metrics", {}).items()}
    if not directions:  # of a task that declares none, or of an earlier version
        directions = dict.fromkeys(name for one in runs for name in _metrics(one))
    keys = dict.fromkeys(key for one in runs for key in one.config)
    differing = [key for key in keys if len({json.dumps(one.config.get(key)) for one in runs}) > 1]
    facts = {
        "version": VERSION,
        "distcore": __version__,
        "command": command_line(),
        "metrics": directions,
        "runs": [_run_facts(name, one, directions, differing) for name, one in zip(names, runs, strict=True)],
        "notes": list(_notes(names, runs)),
    }
    return dict(json.loads(strict_json(facts)))


def show(facts: Facts) -> None:
    """Print the table, its columns folded on a narrow screen, and the notes below it."""
    console = stdout_console(FILE_WIDTH)
    print_cells(console, headings(facts), cells(facts), numbers=True)
    for line in facts["notes"]:
        say(console, line)


def headings(facts: Facts) -> list[str]:
    """Return the column headings."""
    return ["run", *_columns(facts)]


def cells(facts: Facts) -> list[list[str]]:
    """Return the cells of each run."""
    return [[run["name"], *(cell(run) for cell in _columns(facts).values())] for run in facts["runs"]]


def _columns(facts: Facts) -> dict[str, Cell]:
    """Map each heading after the first to the function that makes its cell."""
    metrics = {f"{name}{ARROWS[way]}": partial(_metric, facts, name) for name, way in facts["metrics"].items()}
    differing = dict.fromkeys(key for run in facts["runs"] for key in run["differs"])
    return {
        **metrics,
        "samples/s": lambda run: number(run["samples_per_second"], 1),
        "training s": lambda run: number(run["train_seconds"], 1),
        "peak MiB/rank": lambda run: number(run["peak_memory_mib"], 0),
        **{key: partial(_setting, key) for key in differing},
    }


def _metric(facts: Facts, name: str, run: Facts) -> str:
    value, way = run["metrics"][name], facts["metrics"][name]
    others = [other["metrics"][name] for other in facts["runs"] if other["metrics"][name] is not None]
    is_best = way and len(others) > 1 and value == {"min": min, "max": max}[way](others)
    return f"{number(value, 4)}{BEST if is_best else ''}"


def _setting(key: str, run: Facts) -> str:
    return _plain(run["differs"][key])


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _run_facts(name: str, one: Finished, metrics: Mapping[str, object], differing: Sequence[str]) -> Facts:
    peak, reached = one.report.get("peak_memory_bytes"), _metrics(one)
    return {
        "name": name,
        "folder": str(one.folder),
        "finished": bool(one.report),
        "metrics": {metric: reached.get(metric) for metric in metrics},
        **{key: one.report.get(key) for key in ("steps", "samples_per_second", "train_seconds", "world_size")},
        "peak_memory_mib": peak / 2**20 if peak else None,
        "differs": {key: one.config.get(key) for key in differing},
    }


def _metrics(one: Finished) -> dict[str, float]:
    """Return the finite numbers of the final test."""
    tested = one.report.get("evaluation", {})
    return {
        name: value
        for name, value in tested.items()
        if isinstance(value, float | int) and math.isfinite(value) and name not in COUNTS
    }


def _names(runs: Sequence[Finished]) -> list[str]:
    """Return the paths of the folders, without what all have in common."""
    above = os.path.commonpath([one.folder.absolute().parent for one in runs])
    return [str(one.folder.absolute().relative_to(above)) for one in runs]


def _notes(names: Sequence[str], runs: Sequence[Finished]) -> Iterator[str]:
    """Yield what a reader must know before comparing the runs, one line each."""
    rows = {one.report["evaluation"].get("dataset_size") for one in runs if one.report}
    if len(rows) > 1:
        yield f"tested on different rows: {', '.join(map(str, sorted(rows, key=str)))} of them"
    for name, one in zip(names, runs, strict=True):
        if not one.report:
            yield f"{name}: not finished, it has no report.json"

"""The screen of ``distcore watch``, and its lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from distcore.cli import GAP
from distcore_workbench.observe.stragglers import PARTS
from distcore_workbench.observe.times import attempts_of
from distcore_workbench.report.curves import lines_of
from distcore_workbench.report.folders import RunFolder
from distcore_workbench.report.live import drawn_curves
from distcore_workbench.report.side_by_side import COUNTS

MIB = 2**20
LAST = 3
"""Lines about slow ranks."""
HIDDEN = (" seconds", " rank")
"""Ends of the titles of curves that the screen shows in other places."""
SHOWN = {
    "train/loss": "loss {:.4f}",
    "train/samples_per_second": "{:.0f} samples/s",
    "train/tokens_per_second": "{:.0f} tokens/s",
    "train/mfu": "MFU {:.1%}",
}
"""Values of a log line, in this order."""


def screen(run: RunFolder, console: Console) -> RenderableType:
    """Return how far the run is, its curves, its time by phase, and the last
    values of each rank.
    """
    logged = [line for line in lines_of(run.folder, run.config) if "train/loss" in line]
    if not logged:
        return Text(f"{run.folder}: waiting for the first step; Ctrl-C ends")
    parts: list[RenderableType] = [Text(f"{run.folder}: {_logged(run, logged[-1])}"), Text()]
    parts += [drawn_curves([run.folder], console, hidden=HIDDEN), Text(_phases(logged[-1]))]
    attempts = attempts_of(run.folder)
    ranks = {
        rank: sent
        for moment in (attempts[-1] if attempts else ())
        for rank, sent in moment.ranks.items()
    }
    slow = [Text(line) for moment in (attempts[-1] if attempts else ()) for line in moment.slow]
    return Group(*parts, *([_table(ranks)] if ranks else []), *slow[-LAST:])


def lines_from(run: RunFolder) -> list[str]:
    """Return a line for each log line and each evaluation of the run."""
    return [
        _logged(run, line) if "train/loss" in line else _evaluated(line)
        for line in lines_of(run.folder, run.config)
    ]


def _logged(run: RunFolder, line: Mapping[str, Any]) -> str:
    steps, step = steps_of(run, line), line["step"]
    parts = [f"step {step}/{steps}" if steps else f"step {step}", f"epoch {line.get('epoch', 0):g}"]
    parts += [text.format(line[key]) for key, text in SHOWN.items() if line.get(key) is not None]
    if (most := line.get("train/peak_memory_max_bytes")) is not None:
        parts.append(f"rank {line['train/peak_memory_max_rank']:.0f} {most / MIB:.0f} MiB")
    speed = line.get("train/samples_per_second")
    if steps and speed:
        left = round((steps - step) * run.config.global_batch_size / speed)
        parts.append(f"left {timedelta(seconds=max(0, left))}")
    return "  ".join(parts)


def steps_of(run: RunFolder, line: Mapping[str, Any]) -> int | None:
    """Return the optimizer steps of the whole run, by its config and how far it is; ``None`` if
    that is not known.
    """
    if run.config.max_steps:
        return run.config.max_steps
    epoch = line.get("epoch")
    return max(line["step"], round(line["step"] * run.config.epochs / epoch)) if epoch else None


def _evaluated(line: Mapping[str, Any]) -> str:
    values = (
        (key.removeprefix("eval/"), value) for key, value in line.items() if key.startswith("eval/")
    )
    metrics = (
        f"{name.replace('_', ' ')} {value:.3g}"
        for name, value in values
        if name not in COUNTS and value is not None
    )
    return f"evaluation at step {line['step']}: {', '.join(metrics)}"


def _phases(line: Mapping[str, Any]) -> str:
    """Return the share of each phase in the time since the log line before; empty if the
    run was not observed.
    """
    seconds = dict(_seconds(line))
    whole = sum(seconds.values())
    shares = ", ".join(
        f"{phase} {each / whole:.0%}" for phase, each in seconds.items() if each >= whole / 200
    )
    return f"\ntime: {shares}\n" if whole else ""


def _seconds(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if key.startswith("train/") and key.endswith("_seconds") and value is not None:
            yield key.removeprefix("train/").removesuffix("_seconds"), value


def _table(ranks: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a row for each rank: its peak memory, and the own part of a step, as
    it told them last.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    for heading in ("rank", "peak MiB", "data ms/step", "compute ms/step"):
        table.add_column(heading, justify="right")
    for rank, sent in sorted(ranks.items(), key=lambda one: int(one[0])):
        own = [f"{sent.get(part, 0.0) * 1e3:.1f}" for part in PARTS]
        table.add_row(rank, f"{sent.get('peak_memory', 0) / MIB:.0f}", *own)
    return table

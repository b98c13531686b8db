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
"""Lines about slow ranks that are shown, the last ones."""
HIDDEN = (" seconds", " rank")
"""Ends of the titles of curves that the screen shows in another form."""
SHOWN = {
    "train/loss": "loss {:.4f}",
    "train/samples_per_second": "{:.0f} samples/s",
    "train/tokens_per_second": "{:.0f} tokens/s",
    "train/mfu": "MFU {:.1%}",
}
"""Values of a log line, in this order."""


def screen(run: RunFolder, console: Console) -> RenderableType:
    """Return the progress of a run, its curves, its time by phase, and each rank's last values."""
    logged = [line for line in lines_of(run.folder, run.config) if "train/loss" in line]
    if not logged:
        return Text(f"{run.folder}: waiting for the first step; Ctrl-C ends")
    newest = logged[-1]
    parts: list[RenderableType] = [
        Text(f"{run.folder}: {_logged(run, newest)}"),
        Text(),
        drawn_curves([run.folder], console, hidden=HIDDEN),
        Text(_phases(newest)),
    ]
    attempts = attempts_of(run.folder)
    moments = attempts[-1] if attempts else []
    values_by_rank: dict[str, Mapping[str, float]] = {}
    slow_ranks: list[Text] = []
    for moment in moments:
        values_by_rank |= moment.ranks
        slow_ranks += map(Text, moment.slow)
    if values_by_rank:
        parts.append(_table(values_by_rank))
    return Group(*parts, *slow_ranks[-LAST:])


def lines_from(run: RunFolder) -> list[str]:
    """Return a line for each log line and each evaluation of the run."""
    return [
        _logged(run, line) if "train/loss" in line else _evaluated(line)
        for line in lines_of(run.folder, run.config)
    ]


def _logged(run: RunFolder, line: Mapping[str, Any]) -> str:
    """Return a log line as text: progress, ``SHOWN``, the fullest rank, and the time left."""
    step = line["step"]
    steps = steps_of(run, line)
    parts = [f"step {step}/{steps}" if steps else f"step {step}"]
    parts.append(f"epoch {line.get('epoch', 0):g}")
    for key, text in SHOWN.items():
        if line.get(key) is not None:
            parts.append(text.format(line[key]))
    peak_memory = line.get("train/peak_memory_max_bytes")
    if peak_memory is not None:
        rank = line["train/peak_memory_max_rank"]
        parts.append(f"rank {rank:.0f} {peak_memory / MIB:.0f} MiB")
    speed = line.get("train/samples_per_second")
    if steps and speed:
        samples_left = (steps - step) * run.config.global_batch_size
        seconds_left = round(samples_left / speed)
        parts.append(f"left {timedelta(seconds=max(0, seconds_left))}")
    return "  ".join(parts)


def steps_of(run: RunFolder, line: Mapping[str, Any]) -> int | None:
    """Return the optimizer steps of the whole run, by its config and its progress.

    ``None`` if the config bounds no steps and the line has no epoch.
    """
    if run.config.max_steps:
        return run.config.max_steps
    epoch = line.get("epoch")
    if not epoch:
        return None
    step: int = line["step"]
    steps_at_this_rate = round(step * run.config.epochs / epoch)
    return max(step, int(steps_at_this_rate))


def _evaluated(line: Mapping[str, Any]) -> str:
    """Return the metrics of an evaluation as text, without its counts."""
    metrics = []
    for key, value in line.items():
        name = key.removeprefix("eval/")
        if key.startswith("eval/") and name not in COUNTS and value is not None:
            metrics.append(f"{name.replace('_', ' ')} {value:.3g}")
    return f"evaluation at step {line['step']}: {', '.join(metrics)}"


def _phases(line: Mapping[str, Any]) -> str:
    """Return the share of each phase in the time since the log line before.

    Empty if the run was not observed.
    """
    seconds = dict(_seconds(line))
    whole = sum(seconds.values())
    if not whole:
        return ""
    shares = []
    for phase, phase_seconds in seconds.items():
        if phase_seconds >= whole / 200:  # less would be shown as 0 %
            shares.append(f"{phase} {phase_seconds / whole:.0%}")
    return f"\ntime: {', '.join(shares)}\n"


def _seconds(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield each phase of a log line with its seconds."""
    for key, value in line.items():
        if key.startswith("train/") and key.endswith("_seconds") and value is not None:
            yield key.removeprefix("train/").removesuffix("_seconds"), value


def _table(values_by_rank: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a row for each rank: the peak memory and the step times that it sent last."""
    gap_to_the_right = (0, GAP, 0, 0)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=gap_to_the_right)
    for heading in ("rank", "peak MiB", "data ms/step", "compute ms/step"):
        table.add_column(heading, justify="right")
    for rank in sorted(values_by_rank, key=int):
        values = values_by_rank[rank]
        peak_memory = f"{values.get('peak_memory', 0) / MIB:.0f}"
        step_times = [f"{values.get(part, 0.0) * 1e3:.1f}" for part in PARTS]
        table.add_row(rank, peak_memory, *step_times)
    return table

"""Run a comparison: from the request to the table and the three files."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from distcore import ConfigError, RankError
from distcore.checkpoint import find
from distcore.cli import set_up_logging
from distcore.files import strict_json
from distcore.launchers.processes import crowding_warning
from distcore_workbench.compare.comparison_page import page
from distcore_workbench.compare.comparison_rows import CompareRequest, Row, rows_of
from distcore_workbench.compare.comparison_table import markdown, show
from distcore_workbench.compare.distance import distance
from distcore_workbench.compare.facts import Entry, Facts, communication, facts_of
from distcore_workbench.compare.foreign_load import foreign_load
from distcore_workbench.compare.runs import Failed, profile_run, time_run
from distcore_workbench.pages.document import command_line

T = TypeVar("T")
log = logging.getLogger("distcore")


def run(request: CompareRequest) -> int:
    """Compare, and return the exit code: 0, or 3 if a row failed. Raises DistcoreError."""
    load = foreign_load()  # before anything else: our own runs are load, too
    out = free_folder(request.out)
    rows, reference = rows_of(request, out)
    set_up_logging(rows[0].config, rank=0)
    for warning in warnings_of(rows, load):
        log.warning("%s", warning)
    entries = [Entry(row=row) for row in rows]
    complete = False
    try:
        measure(entries, reference, request)
        complete = True
    finally:  # an interrupted comparison keeps its measurements
        facts = facts_of(
            entries, reference, request.warm_up, _about(request, load) | {"complete": complete}
        )
        write(
            {"json": strict_json(facts, indent=1), "md": markdown(facts), "html": page(facts)}, out
        )
    show(facts)
    print(f"compared: {out}/compare.html, compare.md, compare.json", flush=True)
    return RankError.exit_code if any(entry.failed for entry in entries) else 0


def measure(entries: Sequence[Entry], reference: str, request: CompareRequest) -> None:
    """Run every row that can run, round by round; then measure distances and communication,
    apart from the times.
    """
    for number, entry in schedule(entries, request.rounds, request.interleave):
        if entry.runs:
            _time(entry, number, request.rounds)
    base = next(entry for entry in entries if entry.row.name == reference)
    for entry in entries:
        if entry.timings and base.timings:
            entry.distance = distance(_parameters(entry), _parameters(base))
        if entry.runs and request.communication and entry.timings[0].report["world_size"] > 1:
            entry.profile = profile_run(entry.row.config, entry.row.folder / "profile")
            result = communication(entry.profile)
            shown = f"{result * 1e3:.1f} ms per step" if result is not None else "not measurable"
            _print(f"{entry.row.name}: communication {shown}")


def warnings_of(rows: Sequence[Row], load: float | None) -> Iterator[str]:
    """Yield reasons to doubt the timings before the first run: ``load`` of other programs,
    and too many ranks.
    """
    if load is not None:
        yield (
            f"load average {load:.1f} on {os.cpu_count()} core(s): other programs are at work here,"
            " or just were, and make these times long and uneven; compare again a minute after"
            " they have ended"
        )
    for row in rows:
        if row.reason is None and (warning := crowding_warning(row.config)):
            yield f"row {row.name!r}: {warning}"


def _about(request: CompareRequest, load: float | None) -> Facts:
    """Return how the comparison was made, for compare.json. ``load``: of other programs when it
    began, if too much.
    """
    made: Facts = {
        "command": command_line(),
        "rounds": request.rounds,
        "interleaved": request.interleave,
    }
    return made | {"foreign_load": load}


def schedule(entries: Sequence[T], rounds: int, interleave: bool) -> Iterator[tuple[int, T]]:
    """Yield (round, entry) in the order of running, rounds from 1.

    With ``interleave`` every second round runs in reverse, so that a machine that grows slower is
    fair to all rows.
    """
    if not interleave:
        yield from ((number, entry) for entry in entries for number in range(1, rounds + 1))
        return
    for number in range(1, rounds + 1):
        yield from ((number, entry) for entry in (entries if number % 2 else reversed(entries)))


def write(texts: Mapping[str, str], out: Path) -> None:
    """Write the files ``compare.KIND`` into ``out``; raises ConfigError if that fails."""
    for kind, text in texts.items():
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"compare.{kind}").write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--out {out}: compare.{kind} cannot be written: {error.strerror}"
            ) from None


def _time(entry: Entry, number: int, rounds: int) -> None:
    """Time one run of a row. Later rounds keep no checkpoint, only its distance from that
    of the first round.
    """
    out = entry.row.folder / f"round-{number}"
    result = time_run(entry.row.config, out)
    prefix = f"round {number} of {rounds}: " if rounds > 1 else ""
    if isinstance(result, Failed):
        entry.failed = result
        _print(f"{prefix}{entry.row.name}: failed: {result.error}")
        return
    entry.timings.append(result)
    speed = result.report["samples_per_second"]
    _print(f"{prefix}{entry.row.name}: {result.wall:.1f} s, {speed:.1f} samples/s in training")
    if len(entry.timings) > 1:
        moved = distance(_checkpoint(out), _parameters(entry))
        entry.repeat = max(filter(None, (entry.repeat, moved)), key=attrgetter("largest"))
        shutil.rmtree(out / "checkpoints")


def _parameters(entry: Entry) -> Path:
    """Return the checkpoint whose parameters are compared with those of other rows."""
    return _checkpoint(entry.row.folder / "round-1")


def _checkpoint(out: Path) -> Path:
    """Return the newest checkpoint of a run folder; raises RankError if there is none."""
    result = find("auto", out)
    if result is None:
        raise RankError(f"{out}: the run succeeded but left no checkpoint")
    return result


def free_folder(given: str | None) -> Path:
    """Return the folder to write to, not created yet; raises ConfigError if another
    comparison is in it.
    """
    folder = Path(given or f"runs/compare-{datetime.now():%Y%m%d-%H%M%S}")
    if folder.is_file() or any((folder / name).exists() for name in ("compare.json", "runs")):
        raise ConfigError(
            f"--out {folder}: holds another comparison, or is a file; choose another folder"
        )
    return folder


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

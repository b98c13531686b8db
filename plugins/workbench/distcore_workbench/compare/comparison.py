"""Run a comparison: from the request to the table and the three files."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
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
from distcore_workbench.compare.distance import distance, other_bits
from distcore_workbench.compare.facts import Entry, Facts, communication, facts_of
from distcore_workbench.compare.foreign_load import foreign_load
from distcore_workbench.compare.runs import Failed, profile_run, time_run
from distcore_workbench.pages.document import command_line

T = TypeVar("T")
log = logging.getLogger("distcore")


def run(request: CompareRequest) -> int:
    """Compare, and return the exit code: 0, or 3 if a row failed. Raises DistcoreError."""
    # Before anything else: our own runs are load, too.
    load = foreign_load()
    out = free_folder(request.out)
    rows, reference = rows_of(request, out)
    set_up_logging(rows[0].config, rank=0)
    for warning in warnings_of(rows, load):
        log.warning("%s", warning)
    entries = [Entry(row=row) for row in rows]
    is_complete = False
    try:
        measure(entries, reference, request)
        is_complete = True
    finally:
        # An interrupted comparison keeps its measurements.
        about = _about(request, load, is_complete)
        facts = facts_of(entries, reference, request.warm_up, about)
        texts = {
            "json": strict_json(facts, indent=1),
            "md": markdown(facts),
            "html": page(facts),
        }
        write(texts, out)
    show(facts)
    print(f"compared: {out}/compare.html, compare.md, compare.json", flush=True)
    has_failed = any(entry.failed for entry in entries)
    return RankError.exit_code if has_failed else 0


def measure(entries: Sequence[Entry], reference: str, request: CompareRequest) -> None:
    """Run every row that can run, round by round; then measure distances and communication,
    apart from the times.
    """
    for round_number, entry in schedule(entries, request.rounds, request.interleave):
        if entry.runs:
            _time(entry, round_number, request.rounds)
    base = next(entry for entry in entries if entry.row.name == reference)
    for entry in entries:
        if entry.timings and base.timings:
            entry.distance = distance(_parameters(entry), _parameters(base))
            if entry is not base and entry.row.config.exact is not None:
                entry.bits = other_bits(_parameters(entry), _parameters(base))
        if request.communication and entry.runs:
            ranks = entry.timings[0].report["world_size"]
            if ranks > 1:
                _measure_communication(entry)


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


def _about(request: CompareRequest, load: float | None, is_complete: bool) -> Facts:
    """Return how the comparison was made, for compare.json.

    ``load``: of other programs when it began, if too much.
    """
    return {
        "command": command_line(),
        "rounds": request.rounds,
        "interleaved": request.interleave,
        "foreign_load": load,
        "complete": is_complete,
    }


def schedule(entries: Sequence[T], rounds: int, interleave: bool) -> Iterator[tuple[int, T]]:
    """Yield (round, entry) in the order of running, rounds from 1.

    With ``interleave`` every second round runs in reverse, so that a machine that grows slower is
    fair to all rows.
    """
    round_numbers = range(1, rounds + 1)
    if not interleave:
        for entry in entries:
            for round_number in round_numbers:
                yield round_number, entry
        return
    for round_number in round_numbers:
        is_forward = round_number % 2 == 1
        for entry in entries if is_forward else reversed(entries):
            yield round_number, entry


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


def _measure_communication(entry: Entry) -> None:
    """Profile one run of a row, and print the time of its collectives."""
    entry.profile = profile_run(entry.row.config, entry.row.folder / "profile")
    seconds = communication(entry.profile)
    shown = "not measurable"
    if seconds is not None:
        shown = f"{seconds * 1e3:.1f} ms per step"
    _print(f"{entry.row.name}: communication {shown}")


def _time(entry: Entry, round_number: int, rounds: int) -> None:
    """Time one run of a row.

    Later rounds keep no checkpoint, only its distance from that of the first round.
    """
    out = entry.row.folder / f"round-{round_number}"
    result = time_run(entry.row.config, out)
    prefix = f"round {round_number} of {rounds}: " if rounds > 1 else ""
    if isinstance(result, Failed):
        entry.failed = result
        _print(f"{prefix}{entry.row.name}: failed: {result.error}")
        return
    entry.timings.append(result)
    speed = result.report["samples_per_second"]
    _print(f"{prefix}{entry.row.name}: {result.wall:.1f} s, {speed:.1f} samples/s in training")
    if len(entry.timings) > 1:
        from_first_round = distance(_checkpoint(out), _parameters(entry))
        if entry.repeat is None or from_first_round.largest > entry.repeat.largest:
            entry.repeat = from_first_round
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


def free_folder(requested: str | None) -> Path:
    """Return the folder to write to, not created yet; raises ConfigError if another
    comparison is in it.
    """
    folder = Path(requested or f"runs/compare-{datetime.now():%Y%m%d-%H%M%S}")
    has_comparison = (folder / "compare.json").exists() or (folder / "runs").exists()
    if has_comparison or folder.is_file():
        raise ConfigError(
            f"--out {folder}: holds another comparison, or is a file; choose another folder"
        )
    return folder


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

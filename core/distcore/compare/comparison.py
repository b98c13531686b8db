"""A comparison from its flags to its files."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from distcore.checkpoint import find
from distcore.checkpoint.distance import Distance, distance
from distcore.compare.facts import Entry, Facts, communication, facts_of
from distcore.compare.page import page
from distcore.compare.rows import Request, rows_of
from distcore.compare.runs import Failed, profiled, timed
from distcore.compare.table import markdown, show
from distcore.errors import ConfigError, RankError
from distcore.files import strict_json
from distcore.jobs.logs import set_up_logging

T = TypeVar("T")


def run(request: Request) -> int:
    """Compare; 0 if every row that can run did. Raises DistcoreError."""
    out = _folder(request.out)
    rows, reference = rows_of(request, out)
    set_up_logging(rows[0].config, rank=0)
    entries = [Entry(row=row) for row in rows]
    complete = False
    try:
        measure(entries, reference, request)
        complete = True
    finally:  # what an interrupted comparison has found so far is kept
        facts = facts_of(entries, reference, request.warm_up, _about(request) | {"complete": complete})
        write(facts, out)
    show(facts)
    print(f"compared: {out}/compare.html, compare.md, compare.json", flush=True)
    return RankError.exit_code if any(entry.failed for entry in entries) else 0


def measure(entries: Sequence[Entry], reference: str, request: Request) -> None:
    """Run every row that can, round after round; then measure what must not disturb the times."""
    for number, entry in schedule(entries, request.rounds, request.interleave):
        if entry.runs:
            _time(entry, number, request.rounds)
    base = next(entry for entry in entries if entry.row.name == reference)
    for entry in entries:
        if entry.timings and base.timings:
            entry.distance = distance(_parameters(entry), _parameters(base))
        if entry.runs and request.communication and entry.timings[0].report["world_size"] > 1:
            entry.profile = profiled(entry.row.config, entry.row.folder / "profile")
            found = communication(entry.profile)
            _say(
                f"{entry.row.name}: communication {f'{found * 1e3:.1f} ms a step' if found is not None else 'not seen'}"
            )


def _about(request: Request) -> Facts:
    command = shlex.join(["distcore", *sys.argv[1:]])
    return {"command": command, "rounds": request.rounds, "interleaved": request.interleave}


def schedule(entries: Sequence[T], rounds: int, interleave: bool) -> Iterator[tuple[int, T]]:
    """Say which row runs when: every second round backwards, so that a machine that drifts is fair to all."""
    if not interleave:
        yield from ((number, entry) for entry in entries for number in range(1, rounds + 1))
        return
    for number in range(1, rounds + 1):
        yield from ((number, entry) for entry in (entries if number % 2 else reversed(entries)))


def write(facts: Facts, out: Path) -> None:
    """Write the three files; raises ConfigError where that fails."""
    files = {"compare.json": strict_json(facts, indent=1), "compare.md": markdown(facts), "compare.html": page(facts)}
    for name, text in files.items():
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {out}: {name} cannot be written: {error.strerror}") from None


def _time(entry: Entry, number: int, rounds: int) -> None:
    """One timed run of a row; of the later rounds no checkpoint stays, only its distance from the first round's."""
    out = entry.row.folder / f"round-{number}"
    result = timed(entry.row.config, out)
    of = f"round {number} of {rounds}: " if rounds > 1 else ""
    if isinstance(result, Failed):
        entry.failed = result
        _say(f"{of}{entry.row.name}: failed: {result.error}")
        return
    entry.timings.append(result)
    _say(f"{of}{entry.row.name}: {result.wall:.1f} s, {result.report['samples_per_second']:.1f} samples/s in training")
    if len(entry.timings) > 1:
        apart = distance(_checkpoint(out), _parameters(entry))
        entry.repeat = max(filter(None, (entry.repeat, apart)), key=_size)
        shutil.rmtree(out / "checkpoints")


def _size(apart: Distance) -> float:
    return apart.largest


def _parameters(entry: Entry) -> Path:
    return _checkpoint(entry.row.folder / "round-1")


def _checkpoint(out: Path) -> Path:
    found = find("auto", out)
    if found is None:
        raise RankError(f"{out}: the run ended well, but left no checkpoint")
    return found


def _folder(given: str | None) -> Path:
    """The folder to write to, not made yet; raises ConfigError where there is another comparison in it."""
    folder = Path(given or f"runs/compare-{datetime.now():%Y%m%d-%H%M%S}")
    if folder.is_file() or any((folder / name).exists() for name in ("compare.json", "runs")):
        raise ConfigError(f"--out {folder}: holds another comparison, or is a file; choose another folder")
    return folder


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

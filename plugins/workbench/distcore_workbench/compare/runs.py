"""Run the rows: each run is a ``distcore train`` in a fresh process, with the start-up time
that a user would see.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from distcore import RunConfig, dump_config, with_changes
from distcore.launchers.processes import raise_on_sigterm

PROFILED_STEPS = 20
"""Optimizer steps of a run in which communication is measured; the profile extension needs 18."""
GRACE = 10
"""Seconds that a run gets to end after SIGTERM, before it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long one run took; times are in seconds."""

    wall: float
    """From the start of its process to its end."""
    start_up: float
    """From the start of its process to the first step."""
    steps: tuple[float, ...]
    """Duration of each optimizer step, without evaluations and checkpoints."""
    samples: tuple[int, ...]
    """Rows of each optimizer step, over all ranks."""
    threads: int
    """Computing threads of each rank."""
    report: Mapping[str, Any]
    """The content of report.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A run that failed."""

    error: str
    """The error in one line."""


def time_run(config: RunConfig, out: Path) -> Timing | Failed:
    """Train once, with ``out`` as run folder, and return how long it took."""
    started = time.monotonic()
    error = _train(_with_extensions(config, stopwatch=True), out)
    wall = time.monotonic() - started
    if error:
        return Failed(error=error)
    steps, report = (
        json.loads((out / name).read_text(encoding="utf-8"))
        for name in ("steps.json", "report.json")
    )
    seen = [0, *steps["samples"]]
    return Timing(
        wall=wall,
        start_up=steps["began"] - started,
        steps=tuple(steps["seconds"]),
        samples=tuple(after - before for before, after in pairwise(seen)),
        threads=steps["threads"],
        report=report,
    )


def profile_run(config: RunConfig, out: Path) -> Mapping[str, Any] | Failed:
    """Train for a few steps with the profile extension, untimed; return its profile.json."""
    short = with_changes(config, {"max_steps": PROFILED_STEPS})
    error = _train(_with_extensions(short, profile=True), out)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    if error:
        return Failed(error=error)
    text = (out / "profile.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


def _with_extensions(config: RunConfig, **extensions: bool) -> RunConfig:
    return with_changes(config, {"extensions": config.extensions | extensions})


def _train(config: RunConfig, out: Path) -> str | None:
    """Run ``distcore train``; return its error line, ``None`` on success.

    Its output is in a log file next to ``out``.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    file, log = (out.with_name(f"{out.name}.{kind}") for kind in ("yaml", "log"))
    file.write_text(dump_config(config), encoding="utf-8")
    command = train_command(file, out)
    with log.open("wb") as output, raise_on_sigterm():
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = child.wait()
        finally:
            end(child)
    return error_line(log, code) if code else None


def train_command(file: Path, out: Path) -> list[str]:
    """Return the command that trains the job of the config ``file`` in a process of its own."""
    # -P: files in the current folder must not shadow installed modules.
    python = [sys.executable, "-P", "-m", "distcore"]
    return [*python, "train", str(file), "--out", str(out)]


def end(child: subprocess.Popen[bytes]) -> None:
    """End the process, if it still runs: by SIGTERM, on which it also ends its ranks,
    after ``GRACE`` by SIGKILL.
    """
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def error_line(log: Path, code: int) -> str:
    """Return the last error line in the log of a run that failed, or how its process ended."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return errors[-1] if errors else f"{how}; its output is in {log}"

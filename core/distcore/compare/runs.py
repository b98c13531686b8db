"""Runs of rows: each a ``distcore train`` in a fresh process, so that its start-up is the user's own."""

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

from distcore.config import RunConfig, dump_config
from distcore.launchers.contexts import sigterm_raises

PROFILED_STEPS = 20
"""Optimizer steps of the run in which communication is measured; the profile needs 18."""
PATIENCE = 10
"""Seconds that a run has to end in when the comparison is stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What one run took, in seconds; evaluations and checkpoints are no part of a step."""

    wall: float
    """From the start of its process to its end."""
    start_up: float
    """From the start of its process to the first step."""
    steps: tuple[float, ...]
    samples: tuple[int, ...]
    """Rows of each step."""
    threads: int
    """Of each rank."""
    report: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A run that did not end well: its own one line."""

    error: str


def timed(config: RunConfig, out: Path) -> Timing | Failed:
    """Train once, into ``out``."""
    started = time.monotonic()
    error = _train(_with(config, stopwatch=True), out)
    wall = time.monotonic() - started
    if error:
        return Failed(error=error)
    steps, report = (json.loads((out / name).read_text(encoding="utf-8")) for name in ("steps.json", "report.json"))
    seen = [0, *steps["samples"]]
    return Timing(
        wall=wall,
        start_up=steps["began"] - started,
        steps=tuple(steps["seconds"]),
        samples=tuple(after - before for before, after in pairwise(seen)),
        threads=steps["threads"],
        report=report,
    )


def profiled(config: RunConfig, out: Path) -> Mapping[str, Any] | Failed:
    """Train for a few steps, not timed, under the profile extension; return what it wrote."""
    error = _train(_with(config, profile=True).model_copy(update={"max_steps": PROFILED_STEPS}), out)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    if error:
        return Failed(error=error)
    facts: dict[str, Any] = json.loads((out / "profile.json").read_text(encoding="utf-8"))
    return facts


def _with(config: RunConfig, **extensions: bool) -> RunConfig:
    return config.model_copy(update={"extensions": config.extensions | extensions})


def _train(config: RunConfig, out: Path) -> str | None:
    """Run ``distcore train``, its output in a log beside ``out``; return its error's line, ``None`` if all is well."""
    out.parent.mkdir(parents=True, exist_ok=True)
    file, log = (out.with_name(f"{out.name}.{kind}") for kind in ("yaml", "log"))
    file.write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "distcore", "train", str(file), "--out", str(out)]
    with log.open("wb") as output, sigterm_raises():
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = child.wait()
        finally:
            _end(child)
    return _last_words(log, code) if code else None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Have it end its ranks, and itself; its ranks do not outlive it."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _last_words(log: Path, code: int) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return said[-1] if said else f"{how}; its output is in {log}"

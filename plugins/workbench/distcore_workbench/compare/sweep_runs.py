"""The runs of a sweep, one after the other, each in a process of its own with ranks of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distcore import RunConfig, StoppedError, dump_config
from distcore.jobs import handle_stop_signals
from distcore_workbench.compare.runs import end, train_command

STOPPED = (143, 130, -15, -2)
"""How a run ends that SIGTERM or Ctrl-C has stopped."""
EVERY = 0.5
"""Seconds between two questions whether a run is to end early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a sweep."""

    name: str
    """Its settings, such as ``lr=0.0001,seed=1``; also the name of its folder."""
    config: RunConfig
    """Resolved."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(str(self.config.out))

    @property
    def finished(self) -> bool:
        """True if the run is there already, with its report."""
        return (self.folder / "report.json").is_file()


def goes_on() -> bool:
    """Return False: the run is to go on to its end."""
    return False


class Runs:
    """Trains runs; SIGTERM and Ctrl-C end the one that trains, after a checkpoint, and the sweep."""

    def __init__(self, again: str) -> None:
        """Take the command that goes on with a sweep that was stopped."""
        self._again = again
        self._child: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []

    def train(self, point: Point, which: str, is_to_end: Callable[[], bool] = goes_on) -> int:
        """Train a run unless it is finished; return its exit code, 0 for one that was ended early.

        ``which``: the run in words, such as ``run 2 of 5``. ``is_to_end`` is asked while the run trains. Raises
        StoppedError.
        """
        there = ": finished already" if point.finished else ""
        print(f"{which}: {point.name}{there}", file=sys.stderr, flush=True)
        if there:
            return 0
        with handle_stop_signals(self._stop, says_so=False):  # the run itself does
            code, is_ended = self._train(point, is_to_end)
        if self._signals or (code in STOPPED and not is_ended):
            raise StoppedError(
                f"sweep stopped in {point.name}; go on with: {self._again}",
                *(128 + number for number in self._signals[:1]),
            )
        return 0 if is_ended and code in STOPPED else code

    def _train(self, point: Point, is_to_end: Callable[[], bool]) -> tuple[int, bool]:
        """Return the exit code, and whether the run was ended early."""
        with tempfile.TemporaryDirectory(prefix="distcore-sweep-") as folder:
            file = Path(folder, "config.yaml")
            file.write_text(dump_config(point.config), encoding="utf-8")
            more = ["--resume", "auto"] if point.config.resume else []
            more += ["--max-restarts", str(point.config.max_restarts)] if point.config.max_restarts else []
            self._child = subprocess.Popen([*train_command(file, point.folder), *more])
            is_ended = False
            try:
                while True:
                    try:
                        return self._child.wait(EVERY), is_ended
                    except subprocess.TimeoutExpired:
                        if not is_ended and is_to_end():
                            is_ended = True
                            self._child.terminate()
            finally:
                end(self._child)

    def _stop(self, number: int) -> None:
        """Pass the signal on: a run that gets SIGTERM ends after a checkpoint."""
        self._signals.append(number)
        if self._child is not None and self._child.returncode is None:
            self._child.terminate()

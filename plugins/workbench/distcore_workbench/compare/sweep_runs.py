"""The runs of a sweep, one after the other, each in a process of its own with ranks of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distcore import RunConfig, StoppedError, dump_config
from distcore.launchers.processes import handle_stop_signals
from distcore_workbench.compare.runs import end, train_command

STOPPED = (143, 130, -15, -2)
"""How a run ends that SIGTERM or Ctrl-C has stopped."""
CONFIGS = "configs"
"""Folder beside the run folders with the config file of each."""
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

    @property
    def config_file(self) -> Path:
        """Its config, beside the run folders, where ranks on other machines read it; absolute."""
        return (self.folder.parent / CONFIGS / f"{self.name}.yaml").absolute()

    @property
    def flags(self) -> list[str]:
        """The flags of ``distcore train`` beside its config file and ``--out``."""
        restarts = self.config.max_restarts
        more = ["--resume", "auto"] if self.config.resume else []
        return more + (["--max-restarts", str(restarts)] if restarts else [])

    def write_config(self) -> None:
        """Write ``config_file``."""
        self.config_file.parent.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(dump_config(self.config), encoding="utf-8")


def goes_on() -> bool:
    """Return False: the run is to go on to its end."""
    return False


class Runs:
    """Trains runs; SIGTERM and Ctrl-C end the one that trains, after a
    checkpoint, and the sweep.
    """

    def __init__(self, again: str, flags: Sequence[str] = ()) -> None:
        """Take the command that goes on with a sweep that was stopped, and flags for each run
        that start its ranks.
        """
        self._again = again
        self._flags = flags
        self._child: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []

    def train(self, point: Point, which: str, is_to_end: Callable[[], bool] = goes_on) -> int:
        """Train a run unless it is finished; return its exit code, 0 for one that was ended early.

        ``which``: the run in words, such as ``run 2 of 5``. ``is_to_end`` is asked while the
        run trains. Raises StoppedError.
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
        point.write_config()
        command = train_command(point.config_file, point.folder)
        self._child = subprocess.Popen([*command, *point.flags, *self._flags])
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

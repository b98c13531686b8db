"""Follow one run by its files alone: a screen on a terminal, a line for each of
its log lines elsewhere.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from distcore import ConfigError
from distcore.cli import say
from distcore.files import is_locked
from distcore_workbench.observe.goodput import goodput_of
from distcore_workbench.observe.screen import lines_from, screen
from distcore_workbench.report.folders import folders_of, read, report_of
from distcore_workbench.report.live import GRACE, PAUSE


def folder_of(path: Path) -> Path:
    """Return the run folder that the command line means; raises ConfigError for
    none, and for several.
    """
    folders = folders_of([path], "watch", "give a run folder")
    if len(folders) > 1:
        raise ConfigError(
            f"watch {path}: holds {len(folders)} runs; give one of them, such as {folders[0]}"
        )
    return folders[0]


def watch(folder: Path, console: Console, grace: float = GRACE) -> None:
    """Return when the run has ended: with its report, or because nobody has worked on
    it for ``grace`` seconds.

    Raises ConfigError for a file that is damaged.
    """
    signs, printed = Signs(folder), 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            ended = report_of(folder) is not None
            silent = not ended and signs.silence() > grace
            if signs.have_changed or ended or silent:
                run = read(folder)
                if console.is_terminal:
                    live.update(screen(run, console), refresh=True)
                else:
                    news = lines_from(run)
                    for line in news[min(printed, len(news)) :]:
                        say(console, line)
                    printed = len(news)
            if ended or silent:
                break
            time.sleep(PAUSE)
    goodput = goodput_of(folder)
    for line in (
        str(goodput) if goodput else "",
        "ended" if ended else f"ended without a report: silent for {grace:g} s",
    ):
        if line:
            say(console, line)


class Signs:
    """Signs of life of a run: a lock on its config, or a file that changes."""

    def __init__(self, folder: Path) -> None:
        """Begin with the age of the newest file."""
        self._folder = folder
        self._seen = (0.0, 0)
        self._last = time.monotonic() - max(0.0, time.time() - self._state()[0])
        self.have_changed = True
        """Whether a file has changed between the last two looks."""

    def silence(self) -> float:
        """Look at the files, and return the seconds since the last sign."""
        state = self._state()
        self.have_changed = state != self._seen
        is_first, self._seen = self._seen == (0.0, 0), state
        if is_locked(self._folder / "config.yaml") or (self.have_changed and not is_first):
            self._last = time.monotonic()
        return time.monotonic() - self._last

    def _state(self) -> tuple[float, int]:
        """Return when a file was written last, and the size of the logs."""
        files = [self._folder / "config.yaml", *self._folder.glob("*.jsonl")]
        stats = [file.stat() for file in files]
        return max(stat.st_mtime for stat in stats), sum(stat.st_size for stat in stats)

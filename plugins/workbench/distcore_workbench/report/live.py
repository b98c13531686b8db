"""Follow runs in the terminal: their curves are drawn again whenever a line is added, until the
last run has ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from distcore.files import is_locked
from distcore_workbench.report.folders import report_of
from distcore_workbench.report.report_content import NoStepError, content_of
from distcore_workbench.report.terminal import show_curves

PAUSE = 0.5
"""Seconds between two looks at the files."""
GRACE = 30.0
"""Seconds after which a run that nobody works on counts as ended: ranks that
are restarted need some.
"""


def follow(folders: Sequence[Path], console: Console, grace: float = GRACE) -> None:
    """Return when every run has ended: with its report, or because nobody has worked
    on it for ``grace`` seconds.

    On a terminal the curves are shown meanwhile; elsewhere nothing is. Raises ConfigError for a
    file that is damaged.
    """
    seen_alive = dict.fromkeys(folders, time.monotonic())
    shown: tuple[int, ...] = ()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            for folder in folders:
                if is_locked(folder / "config.yaml"):
                    seen_alive[folder] = time.monotonic()
            if all(
                report_of(folder) or time.monotonic() - seen_alive[folder] > grace
                for folder in folders
            ):
                return
            sizes = tuple(_size(folder) for folder in folders)
            if console.is_terminal and sizes != shown:
                shown = sizes
                live.update(drawn_curves(folders, console), refresh=True)
            time.sleep(PAUSE)


def _size(folder: Path) -> int:
    """Return the size of a run's logs, which changes when the run has something new."""
    return sum(file.stat().st_size for file in folder.glob("*.jsonl"))


def drawn_curves(folders: Sequence[Path], console: Console, hidden: tuple[str, ...] = ()) -> Text:
    """Return the curves of the runs as they are now, without ``hidden``, ends of titles."""
    try:
        content = content_of(folders)
    except NoStepError:
        return Text("waiting for the first step; Ctrl-C ends")
    charts = tuple(chart for chart in content.charts if not chart.title.endswith(hidden))
    with console.capture() as drawn:
        show_curves(replace(content, charts=charts), console)
    return Text.from_ansi(drawn.get())

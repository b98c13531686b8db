"""The progress that a user watches: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distcore.extensions.metrics import numbers
from distcore.plugin.contract import Evaluation, Progress, Run
from distcore.plugin.hookspecs import hookimpl

COUNTS = {"evaluated", "unique", "dataset_size"}
"""Keys of an evaluation's summary that are not metrics."""


@dataclass
class ProgressLine:
    """Show step, epoch, loss, learning rate, speed and time left at every log line; on the main rank's stderr."""

    bar_width: int = 24
    """Width of the bar in characters; 0: no bar."""

    def __post_init__(self) -> None:
        self._console: Console | None = None
        self._live: Live | None = None

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Start the live line if stderr is a terminal."""
        if not run.world.is_main:
            return
        self._console = Console(stderr=True, highlight=False)
        if self._console.is_terminal:
            # No refresh thread: the line changes only when a record comes, and steps in between cost nothing.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            self._console.show_cursor(True)  # a killed rank must not leave the terminal without a cursor

    @hookimpl
    def on_log(self, run: Run, record: dict[str, float]) -> None:
        """Redraw the live line, or print a plain one."""
        if self._live is not None:
            # The empty line below takes what other processes print, so that it does not mix with the redrawn line.
            self._live.update(Group(self._row(run, record), Text()), refresh=True)
        elif self._console is not None:
            self._say(describe(run, record))

    @hookimpl
    def on_evaluation_end(self, run: Run, progress: Progress, evaluation: Evaluation) -> None:
        """Print the metrics of an evaluation."""
        self._say(describe_evaluation(f"evaluation at step {progress.step}", evaluation.summary()))

    @hookimpl
    def on_run_end(self, run: Run, report: dict[str, object]) -> None:
        """Stop the live line."""
        if self._live is not None:
            self._live.stop()
        self._live = self._console = None

    def _row(self, run: Run, record: dict[str, float]) -> Table:
        row = Table.grid(padding=(0, 1))
        text = Text(describe(run, record), no_wrap=True, overflow="ellipsis")
        if self.bar_width:
            row.add_row(ProgressBar(total=run.total_steps, completed=record["step"], width=self.bar_width), text)
        else:
            row.add_row(text)
        return row

    def _say(self, line: str) -> None:
        """Print ``line`` without wrapping it, even on a narrow screen: a log file needs whole lines."""
        if self._live is not None and self._console is not None:
            self._console.print(line, soft_wrap=True)
        elif self._console is not None:
            print(line, file=sys.stderr, flush=True)


def describe(run: Run, record: dict[str, float]) -> str:
    """Return a log record as a line: ``step 120/630  epoch 2  loss 0.41  lr 0.0004  213 samples/s  eta 0:01:12``."""
    speed = record["samples_per_second"]
    parts = [
        f"step {record['step']:.0f}/{run.total_steps}",
        f"epoch {record['epoch']:g}",
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.3g}",
        f"{speed:.0f} samples/s",
        f"eta {time_left(run, record['step'], speed)}",
    ]
    return "  ".join(parts)


def time_left(run: Run, step: float, samples_per_second: float) -> str:
    """Return the time for the remaining steps at this speed, as ``H:MM:SS``."""
    if samples_per_second <= 0:
        return "-:--:--"
    samples = (run.total_steps - step) * run.config.global_batch_size
    return str(timedelta(seconds=round(samples / samples_per_second)))


def describe_evaluation(what: str, summary: dict[str, object]) -> str:
    """Return an evaluation as a line: ``evaluation at step 120: loss 0.41, accuracy 0.873, evaluated 320 of 320``.

    ``what`` is how the line begins.
    """
    metrics = {name: value for name, value in numbers(summary).items() if name not in COUNTS}
    values = "".join(f"{name.replace('_', ' ')} {value:.3g}, " for name, value in metrics.items())
    return f"{what}: {values}evaluated {summary['evaluated']} of {summary['dataset_size']}"

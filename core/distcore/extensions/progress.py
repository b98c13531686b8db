"""The progress that a user watches: one live line on a terminal or in a
notebook, plain lines elsewhere.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from math import isfinite

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distcore.extensions.metrics import numbers
from distcore.plugin.report import Report
from distcore.plugin.strategy.contract import Evaluation, Progress, Run
from distcore.plugin.strategy.hookspecs import hookimpl

COUNTS = {"evaluated", "unique", "dataset_size"}
"""Keys of an evaluation's summary that are not metrics."""
NOT_FINITE = (
    "try a lower lr (--lr), a warm-up, or precision fp32; extensions.nan_guard=true (--set) ends a"
    " run there"
)
"""Advice for a loss that is NaN or infinite."""
SPEEDS = {
    "samples_per_second": "{:.0f} samples/s",
    "tokens_per_second": "{:.0f} tokens/s",
    "mfu": "MFU {:.1%}",
}
SHORTEST_BAR = 8
"""Characters; a shorter bar says nothing, and the text gets its place."""
CELL_BAR = 20
"""Characters of the bar below the cell of a notebook."""


@dataclass
class ProgressLine:
    """Show step, epoch, loss, learning rate, speed and time left at every log line; on
    the main rank's stderr.
    """

    bar_width: int = 24
    """Width of the bar in characters; 0: no bar."""

    def __post_init__(self) -> None:
        self._console: Console | None = None
        self._live: Live | None = None
        self._cell: NotebookLine | None = None
        self._warn_of_loss = True

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Start the live line if stderr is a terminal or a notebook."""
        if not run.world.is_main:
            return
        # a notebook, also from a rank that was forked there
        if type(sys.stderr).__module__.startswith("ipykernel."):
            self._cell = NotebookLine()
            return
        self._console = Console(stderr=True, highlight=False)
        if self._console.is_terminal:
            # No refresh thread: the line changes only when a record comes, and steps in
            # between cost nothing.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            # a killed rank must not leave the terminal without a cursor
            self._console.show_cursor(True)

    @hookimpl
    def on_log(self, run: Run, record: dict[str, float]) -> None:
        """Redraw the live line, or print a plain one; say once that the loss is not finite."""
        if (self._console or self._cell) and self._warn_of_loss and not isfinite(record["loss"]):
            self._warn_of_loss = False
            self._say(f"the loss is {record['loss']}: {NOT_FINITE}")
        if self._cell is not None:
            self._cell.update(f"{text_bar(run, record)} {describe(run, record)}")
        elif self._live is not None:
            # The empty line below takes what other processes print, so that it does not mix with
            # the redrawn line.
            row = self._row(run, record, self._live.console.width)
            self._live.update(Group(row, Text()), refresh=True)
        elif self._console is not None:
            self._say(describe(run, record))

    @hookimpl
    def on_evaluation_end(self, run: Run, progress: Progress, evaluation: Evaluation) -> None:
        """Print the metrics of an evaluation."""
        of = "" if run.ema is None else " of the EMA"
        self._say(
            describe_evaluation(f"evaluation{of} at step {progress.step}", evaluation.summary())
        )

    @hookimpl
    def on_run_end(self, run: Run, report: Report) -> None:
        """Stop the live line."""
        if self._live is not None:
            self._live.stop()
        if self._cell is not None:
            self._cell.end()
        self._live = self._console = self._cell = None

    def _row(self, run: Run, record: dict[str, float], width: int) -> Table:
        """Return the live line of a log record, with a bar where there is room for one."""
        text = describe(run, record, width)
        room = min(self.bar_width, width - len(text) - 1)
        row = Table.grid(padding=(0, 1))
        if room >= SHORTEST_BAR:
            bar = ProgressBar(total=run.total_steps, completed=record["step"], width=room)
            row.add_row(bar, Text(text))
        else:
            row.add_row(Text(text, no_wrap=True, overflow="ellipsis"))
        return row

    def _say(self, line: str) -> None:
        """Print a line that stays: in a notebook, above the live line, or to stderr."""
        if self._cell is not None:
            self._cell.say(line)
        elif self._live is not None:
            self._live.console.print(Text(line))
        elif self._console is not None:
            print(line, file=sys.stderr, flush=True)


class NotebookLine:
    """One bar below the cell of a notebook, which shows a carriage return as a terminal does
    and knows no cursor.
    """

    def __init__(self) -> None:
        self._length = 0

    def update(self, text: str) -> None:
        """Replace the line by ``text``."""
        print(f"\r{text.ljust(self._length)}", end="", file=sys.stderr, flush=True)
        self._length = len(text)

    def say(self, text: str) -> None:
        """Show ``text`` permanently; the next output is below it."""
        self.update(text)
        self.end()

    def end(self) -> None:
        """Leave the line as it is, and end."""
        if self._length:
            print(file=sys.stderr, flush=True)
        self._length = 0


def text_bar(run: Run, record: dict[str, float]) -> str:
    """Return how far the run is as a bar of characters, for a notebook, which knows no other."""
    done = round(CELL_BAR * record["step"] / max(1, run.total_steps))
    return "█" * done + "░" * (CELL_BAR - done)


def describe(run: Run, record: dict[str, float], width: int | None = None) -> str:
    """Return a log record as a line: ``step 120/630 epoch 2.1 loss 0.41 lr 0.0004
    213 samples/s eta 0:01:12``.

    If the line is longer than ``width`` characters, it leaves out learning rate,
    then epoch, then loss.
    """
    parts = {
        "step": f"step {record['step']:.0f}/{run.total_steps}",
        "epoch": f"epoch {round(record['epoch'], 2):g}",
        "loss": f"loss {record['loss']:.4f}",
        "lr": f"lr {record['lr']:.3g}",
        "speed": "  ".join(
            text.format(record[name]) for name, text in SPEEDS.items() if name in record
        ),
        "eta": f"eta {time_left(run, record['step'], record['samples_per_second'])}",
    }
    for part in ("lr", "epoch", "loss"):
        if width is not None and len("  ".join(parts.values())) > width:
            del parts[part]
    return "  ".join(parts.values())


def time_left(run: Run, step: float, samples_per_second: float) -> str:
    """Return the time for the remaining steps at this speed, as ``H:MM:SS``."""
    if samples_per_second <= 0:
        return "-:--:--"
    samples = (run.total_steps - step) * run.config.global_batch_size
    return str(timedelta(seconds=round(samples / samples_per_second)))


def describe_evaluation(what: str, summary: dict[str, object]) -> str:
    """Return an evaluation as a line: ``evaluation at step 120: loss 0.41, accuracy 0.873,
    evaluated 320 of 320``.

    The line begins with ``what``.
    """
    parts = []
    for name, value in numbers(summary).items():
        if name not in COUNTS:
            parts.append(f"{name.replace('_', ' ')} {value:.3g}")
    parts.append(f"evaluated {summary['evaluated']} of {summary['dataset_size']}")
    return f"{what}: {', '.join(parts)}"

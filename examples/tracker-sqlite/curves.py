"""The curves of all runs in one SQLite table."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore import DistcoreError, Evaluation, Progress, Run, hookimpl

TABLES = """
CREATE TABLE IF NOT EXISTS curves
    (run TEXT, step INTEGER, name TEXT, value REAL, PRIMARY KEY (run, step, name));
"""


@dataclass
class Curves:
    """Write logged values as ``train/NAME``, and metrics of evaluations as ``eval/NAME``,
    from the main rank.

    A run is named by its folder. One that is resumed replaces what it had written
    after the checkpoint's step.
    """

    file: str = "curves.sqlite"
    """The database, relative to the run folder; ``../curves.sqlite`` has the curves of
    all runs beside it.
    """
    wait: float = 30.0
    """Seconds to wait while another run writes."""

    def __post_init__(self) -> None:
        if not self.wait >= 0:
            raise DistcoreError(f"extension curves: wait = {self.wait}: must be 0 or more seconds")

    @hookimpl
    def on_run_start(self, run: Run, progress: Progress) -> None:
        """Make the table, and drop what an earlier attempt wrote after this step."""
        self._out = Path(str(run.config.out)).absolute() if run.world.is_main else None
        self._write(
            "DELETE FROM curves WHERE run = :run AND step > :step", [{"step": progress.step}]
        )

    @hookimpl
    def on_log(self, record: Mapping[str, Any]) -> None:
        """Write the values of a log line."""
        self._add("train", record, record["step"])

    @hookimpl
    def on_evaluation_end(self, progress: Progress, evaluation: Evaluation) -> None:
        """Write the metrics of an evaluation."""
        self._add("eval", evaluation.metrics, progress.step)

    def _add(self, kind: str, values: Mapping[str, object], step: int) -> None:
        numbers = {
            name: value
            for name, value in values.items()
            if isinstance(value, int | float) and name != "step"
        }
        rows = [
            {"step": step, "name": f"{kind}/{name}", "value": value}
            for name, value in numbers.items()
        ]
        self._write("INSERT OR REPLACE INTO curves VALUES (:run, :step, :name, :value)", rows)

    def _write(self, statement: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Execute a statement for each row in one transaction, and close the file: nothing
        is open between steps.
        """
        if self._out is None:
            return
        path = self._out / self.file
        try:
            with closing(sqlite3.connect(path, timeout=self.wait)) as database, database:
                database.executescript(TABLES)
                database.executemany(statement, [{"run": self._out.name, **row} for row in rows])
        except sqlite3.Error as error:
            raise DistcoreError(f"extension curves: {path}: {error}") from None

"""Write logged values and evaluations to ``metrics.jsonl`` in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from distcore.files import strict_json
from distcore.plugin.contract import Evaluation, Progress, Run
from distcore.plugin.hookspecs import hookimpl


@dataclass
class Metrics:
    """Write one JSON object per logged step and one per evaluation, as they happen; on the main rank.

    A resumed run appends to the file that is there. If two lines have the same step, the later line is the valid one.
    """

    file: str = "metrics.jsonl"
    """Path of the file, relative to the run folder."""

    def __post_init__(self) -> None:
        self._out: TextIO | None = None

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Open the file."""
        if run.world.is_main:
            path = Path(str(run.config.out), self.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._out = path.open("a", encoding="utf-8", buffering=1)  # line by line: a killed run loses none

    @hookimpl
    def on_log(self, run: Run, record: dict[str, float]) -> None:
        """Write the logged values of a step."""
        self._write(record)

    @hookimpl
    def on_evaluation_end(self, run: Run, progress: Progress, evaluation: Evaluation) -> None:
        """Write the numbers of an evaluation."""
        self._write(asdict(progress) | {"evaluation": numbers(evaluation.summary())})

    @hookimpl
    def on_run_end(self, run: Run, report: dict[str, object]) -> None:
        """Close the file."""
        if self._out is not None:
            self._out.close()
            self._out = None

    def _write(self, record: Mapping[str, object]) -> None:
        if self._out is not None:
            self._out.write(strict_json(record) + "\n")


def numbers(summary: Mapping[str, object]) -> dict[str, float]:
    """Return the values of an evaluation's summary that are numbers, without its tables and texts."""
    return {name: value for name, value in summary.items() if isinstance(value, (int, float))}

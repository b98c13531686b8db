"""Write logged values and evaluations to ``metrics.jsonl`` in the run folder."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TextIO

from distcore.files import strict_json, write_atomically
from distcore.plugin.strategy.contract import Evaluation, Progress, Run
from distcore.plugin.strategy.hookspecs import hookimpl

EVERYWHERE = ("step", "epoch", "samples")
"""Keys that say how far the run is: they are in every line, and belong to no group."""


@dataclass
class Metrics:
    """Write one JSON object per logged step and one per evaluation, as they happen;
    on the main rank.

    Keys are flat: ``train/NAME`` is a logged value, ``eval/NAME`` a number of an evaluation;
    ``step``, ``epoch`` and ``samples`` are in every line. A resumed run replaces the lines after
    the step that it resumes from.
    """

    in_any_loop: ClassVar = True
    """A ``distcore.Session`` writes to it, too."""

    file: str = "metrics.jsonl"
    """Path of the file, relative to the run folder."""

    def __post_init__(self) -> None:
        self._path: Path | None = None
        self._resumed_at = 0
        self._out: TextIO | None = None

    @hookimpl
    def on_run_start(self, run: Run, progress: Progress) -> None:
        """Note where the file is, and from which step on its lines are replaced."""
        if run.world.is_main:
            self._path = Path(str(run.config.out), self.file)
            self._resumed_at = progress.step
            self._path.parent.mkdir(parents=True, exist_ok=True)

    @hookimpl
    def on_log(self, run: Run, record: dict[str, float]) -> None:
        """Write the logged values of a step."""
        self._write(grouped("train", record))

    @hookimpl
    def on_evaluation_end(self, run: Run, progress: Progress, evaluation: Evaluation) -> None:
        """Write the numbers of an evaluation."""
        how_far = {
            "step": progress.step,
            "epoch": run.epochs_at(progress),
            "samples": progress.samples,
        }
        self._write(how_far | grouped("eval", numbers(evaluation.summary())))

    @hookimpl
    def on_run_end(self, run: Run, report: dict[str, object]) -> None:
        """Close the file."""
        self._close()

    @hookimpl(wrapper=True)
    def teardown(self) -> Generator[None, bool, bool]:
        """Close the file of a run that was stopped."""
        self._close()
        return (yield)

    def _close(self) -> None:
        if self._out is not None:
            self._out.close()
        self._out = None

    def _write(self, record: Mapping[str, object]) -> None:
        if self._path is None:
            return
        line = strict_json(record) + "\n"
        if self._out is None:
            # With the first new line and not before: a run that ends without one loses none of
            # its old lines.
            if self._path.is_file():
                former_lines = "".join(lines_up_to(self._resumed_at, self._path))
                write_atomically(self._path, former_lines + line)
                line = ""
            # Line by line: a killed run loses none.
            self._out = self._path.open("a", encoding="utf-8", buffering=1)
        self._out.write(line)


def lines_up_to(step: int, file: Path) -> Iterator[str]:
    """Yield the whole lines of ``file`` that are not of a later step; a killed run may have cut
    its last one off.
    """
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                if json.loads(line)["step"] <= step:
                    yield line.rstrip("\n") + "\n"
            except (ValueError, LookupError, TypeError):
                continue


def grouped(group: str, values: Mapping[str, float]) -> dict[str, float]:
    """Prefix the names of ``values`` with ``group/``, except those in ``EVERYWHERE``."""
    return {
        name if name in EVERYWHERE else f"{group}/{name}": value for name, value in values.items()
    }


def numbers(summary: Mapping[str, object]) -> dict[str, float]:
    """Return the values of an evaluation's summary that are numbers, without
    its tables and texts.
    """
    return {name: value for name, value in summary.items() if isinstance(value, (int, float))}

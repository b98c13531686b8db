"""The common base of trackers: the main rank writes at each event; a failure ends no run."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from distcore import Evaluation, Progress, Report, Run, StrategyError, World, hookimpl
from distcore.checkpoint import find, provenance_of
from distcore.files import strict_json, write_atomically
from distcore.registry import is_installed

log = logging.getLogger("distcore")

FILE = "trackers.json"
"""File in the run folder with each tracker's id of this run, for a resume."""


class Tracker(ABC):
    """A tracker of runs, to which only the main rank writes; a subclass's fields are its options.

    Every logged value is ``train/NAME``, every metric of an evaluation ``eval/NAME``, and of the
    final test ``test/NAME``, by the optimizer step; the paths of checkpoints and the model card are
    texts by name. After the first failure the run continues without the tracker, and logs one line.
    """

    name: ClassVar[str]
    """Name of the extension."""
    library: ClassVar[str]
    """Module and distribution of its library."""
    in_any_loop: ClassVar = True
    """A ``distcore.Session`` writes to it, too."""

    def __post_init__(self) -> None:
        self._is_open = False
        # Here, so that it fails before any rank starts. The package is not imported.
        if not is_installed(self.library):
            raise StrategyError(
                f"extension {self.name!r}: the package {self.library} is not installed. "
                f"Install it with: pip install {self.library}"
            )

    @abstractmethod
    def open(self, run: Run, progress: Progress, known: str | None) -> str | None:
        """Begin, and record the config; return the id for a resume; ``None``: none is needed.

        ``known`` is the id from before the interruption.
        """

    @abstractmethod
    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers by name, of an optimizer step."""

    @abstractmethod
    def text(self, name: str, value: str, step: int) -> None:
        """Record a text by name, at optimizer step ``step``."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Write pending records; ``finished`` is False if the run was stopped and may resume."""

    @hookimpl
    def on_run_start(self, run: Run, progress: Progress) -> None:
        """Begin, or go on after a resume."""
        if run.world.is_main:
            self._is_open = True
            self._try(lambda: self._begin(run, progress))

    @hookimpl
    def on_log(self, run: Run, record: dict[str, float]) -> None:
        """Record the logged values of a step."""

        def record_values() -> None:
            self.scalars(_named("train", record), int(record["step"]))

        self._try(record_values)

    @hookimpl
    def on_evaluation_end(self, run: Run, progress: Progress, evaluation: Evaluation) -> None:
        """Record the metrics of an evaluation."""

        def record_metrics() -> None:
            self.scalars(_named("eval", _numbers(evaluation.metrics)), progress.step)

        self._try(record_metrics)

    @hookimpl
    def on_checkpoint(self, run: Run, progress: Progress, path: Path) -> None:
        """Record the path of a checkpoint."""
        self._try(lambda: self.text(f"checkpoints/{path.name}", str(path), progress.step))

    @hookimpl
    def on_run_end(self, run: Run, report: Report) -> None:
        """Record the final test and the model card, and end."""
        self._try(lambda: self._sum_up(run, report))
        self._end(finished=True)

    @hookimpl(wrapper=True)
    def teardown(self, world: World) -> Generator[None, bool, bool]:
        """End, if the run was stopped before its end."""
        self._end(finished=False)
        return (yield)

    def _begin(self, run: Run, progress: Progress) -> None:
        """Open the tracker with its id of the run folder, and record a new id there."""
        file = Path(str(run.config.out), FILE)
        ids = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        identifier = self.open(run, progress, ids.get(self.name))
        if identifier:
            write_atomically(file, strict_json(ids | {self.name: identifier}, indent=1))

    def _sum_up(self, run: Run, report: Report) -> None:
        """Record the metrics of the final test, and the model card of the newest checkpoint."""
        step = report["steps"]
        evaluation = report["evaluation"]
        tested = {name: evaluation[name] for name in evaluation if name in report["metrics"]}
        self.scalars(_named("test", _numbers(tested)), step)
        path = find("auto", Path(str(run.config.out)))
        if path is not None:
            for name, value in provenance_of(run, path).items():
                self.text(f"card/{name}", value, step)

    def _end(self, finished: bool) -> None:
        self._try(lambda: self.close(finished))
        self._is_open = False

    def _try(self, action: Callable[[], None]) -> None:
        """Do ``action`` if the tracker is open. A failure closes it, and logs one line."""
        if not self._is_open:
            return
        try:
            action()
        except Exception as error:  # of a library, which may raise anything
            self._is_open = False
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            log.warning("tracker %s: %s; the run goes on without it", self.name, reason)


def flat(values: Mapping[str, Any]) -> dict[str, str]:
    """Return config values by dotted key as texts, as trackers take them."""
    texts: dict[str, str] = {}
    for key, value in values.items():
        texts[key] = value if isinstance(value, str) else json.dumps(value)
    return texts


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are numbers, without tables and texts."""
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def _named(group: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return the values as ``GROUP/NAME``, without the number of the step."""
    return {f"{group}/{name}": value for name, value in values.items() if name != "step"}

"""The extension ``accelerate_trackers``: trackers of Accelerate
(``log_with``) under any strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from distcore import Evaluation, Progress, Report, Run, StrategyError, hookimpl, nearest
from distcore.lab import flatten
from distcore_accelerate.accelerator import ensure_state


@dataclass
class AccelerateTrackers:
    """Send every logged value and every evaluation to trackers of Hugging Face Accelerate,
    from the main rank.
    """

    log_with: str | list[str] = "all"
    """Accelerate's names of trackers, such as tensorboard, wandb or mlflow;
    all: every installed one.
    """
    project: str = "distcore"
    """Name of the project, or of the run for a tracker without projects."""
    folder: str = "trackers"
    """Folder for the files of trackers, relative to the run folder."""
    init: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments of each tracker, by its name."""

    def __post_init__(self) -> None:
        self._trackers: list[Any] = []
        self._names = _installed(self.log_with)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Start the trackers on the main rank, and log the config."""
        if not run.world.is_main:
            return
        ensure_state()
        folder = Path(str(run.config.out), self.folder)
        for name in self._names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            directory = [str(folder)] if kind.requires_logging_directory else []
            tracker = kind(self.project, *directory, **self.init.get(name, {}))
            tracker.main_process_only = False  # the other ranks have no trackers
            tracker.start()
            leaves = flatten(run.config.model_dump(mode="json"))
            tracker.store_init_configuration({key: _plain(value) for key, value in leaves.items()})
            self._trackers.append(tracker)

    @hookimpl
    def on_log(self, run: Run, record: dict[str, float]) -> None:
        """Send the values of one log record as ``train/NAME``."""
        self._log("train", record, int(record["step"]))

    @hookimpl
    def on_evaluation_end(self, run: Run, progress: Progress, evaluation: Evaluation) -> None:
        """Send the numbers among the metrics as ``eval/NAME``."""
        self._log("eval", evaluation.metrics, progress.step)

    @hookimpl
    def on_run_end(self, run: Run, report: Report) -> None:
        """Finish the trackers."""
        for tracker in self._trackers:
            tracker.finish()
        self._trackers.clear()

    def _log(self, group: str, values: Mapping[str, object], step: int) -> None:
        numbers = {
            f"{group}/{name}": value
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        for tracker in self._trackers:
            tracker.log(numbers, step=step)


def _installed(log_with: str | list[str]) -> list[str]:
    """Return the trackers to use, in order.

    Raises StrategyError, one line, for an unknown or missing one.
    """
    names = [log_with] if isinstance(log_with, str) else log_with
    there = [str(name) for name in get_available_trackers()]
    if "all" in names:
        return there
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            listed = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            hint = nearest(name, LOGGER_TYPE_TO_CLASS)
            raise StrategyError(
                f"extension 'accelerate_trackers': no tracker {name!r}{hint} (known: all, {listed})"
            )
        if name not in there:
            raise StrategyError(
                f"extension 'accelerate_trackers': tracker {name!r} is not installed; pip"
                " install it"
            )
    return list(dict.fromkeys(names))


def _plain(value: object) -> bool | int | float | str:
    """Return the value in a type that trackers take."""
    return value if isinstance(value, bool | int | float | str) else str(value)

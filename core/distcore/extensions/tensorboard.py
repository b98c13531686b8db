"""Write scalars for TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distcore.errors import StrategyError
from distcore.extensions.metrics import numbers
from distcore.plugin.contract import Evaluation, Progress, Run
from distcore.plugin.hookspecs import hookimpl
from distcore.plugin.report import Report

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass
class TensorBoard:
    """Write every logged value (``train/NAME``) and every metric of an evaluation (``eval/NAME``); on the main rank.

    The x-axis is the optimizer step.
    """

    folder: str = "tensorboard"
    """Folder of the event files, relative to the run folder."""

    flush_seconds: int = 10
    """Seconds between writes to disk."""

    def __post_init__(self) -> None:
        self._writer: SummaryWriter | None = None
        if find_spec("tensorboard") is None:  # fails before any rank starts; the package is not imported
            raise StrategyError(
                "extension 'tensorboard': the package tensorboard is not installed. "
                "Install it with: pip install 'distcore[tensorboard]'"
            )

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Open the event file."""
        if run.world.is_main:
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(str(run.config.out), self.folder)
            self._writer = SummaryWriter(str(folder), flush_secs=self.flush_seconds)

    @hookimpl
    def on_log(self, run: Run, record: dict[str, float]) -> None:
        """Write the logged values of a step."""
        self._write("train", record, int(record["step"]))

    @hookimpl
    def on_evaluation_end(self, run: Run, progress: Progress, evaluation: Evaluation) -> None:
        """Write the metrics of an evaluation."""
        self._write("eval", numbers(evaluation.metrics), progress.step)

    @hookimpl
    def on_run_end(self, run: Run, report: Report) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, group: str, values: dict[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                if name != "step":
                    self._writer.add_scalar(f"{group}/{name}", value, step)

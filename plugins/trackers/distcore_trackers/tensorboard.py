"""Write a run's curves and texts for TensorBoard."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from distcore import Progress, Run, dump_config
from distcore_trackers.tracking import Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass
class TensorBoard(Tracker):
    """Write a run to TensorBoard's event files, from the main rank.

    Scalars are every logged value (``train/NAME``), every metric of an evaluation (``eval/NAME``)
    and of the final test (``test/NAME``), by the optimizer step; texts are the config, the paths of
    checkpoints and the model card. A resumed run replaces the records after the step of its
    checkpoint, one that begins anew all of them.
    """

    name: ClassVar[str] = "tensorboard"
    library: ClassVar[str] = "tensorboard"

    folder: str = "tensorboard"
    """Folder of the event files, relative to the run folder."""

    flush_seconds: int = 10
    """Seconds between writes to disk."""

    def open(self, run: Run, progress: Progress, known: str | None) -> None:
        """Open an event file, and write the config."""
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(str(run.config.out), self.folder)
        # Also where this attempt begins anew: one that was killed before its first
        # checkpoint left records.
        purge = progress.step + 1 if progress.step else 0
        self._excepthook = threading.excepthook
        threading.excepthook = self._keep_quiet
        self._writer: SummaryWriter = SummaryWriter(
            str(folder), purge_step=purge, flush_secs=self.flush_seconds
        )
        self.text("config", f"```yaml\n{dump_config(run.config)}```", progress.step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, name: str, value: str, step: int) -> None:
        """Write a text."""
        self._writer.add_text(name, value, step)

    def close(self, finished: bool) -> None:
        """Close the event file."""
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._excepthook

    def _keep_quiet(self, failed: threading.ExceptHookArgs) -> None:
        """Suppress the writer thread's traceback: the next call raises the same
        error, in one line.
        """
        trace = failed.exc_traceback
        while trace is not None and "tensorboard" not in trace.tb_frame.f_globals.get(
            "__name__", ""
        ):
            trace = trace.tb_next
        if trace is None:
            self._excepthook(failed)

"""Record a run with Weights & Biases."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from distcore import Progress, Run
from distcore_trackers.tracking import Tracker

if TYPE_CHECKING:
    import wandb

log = logging.getLogger("distcore")

PATIENCE = 30
"""Seconds for which the start waits for a server; meanwhile the other ranks wait, too."""


@dataclass
class WeightsAndBiases(Tracker):
    """Record a run with Weights & Biases, by default in files that ``wandb sync`` uploads.

    The history has every logged value (``train/NAME``), every metric of an evaluation
    (``eval/NAME``) and of the final test (``test/NAME``), by the optimizer step; the summary has
    the paths of checkpoints and the model card. A resumed run has the same id. One that begins
    anew, as after a kill before its first checkpoint, replaces what was written.
    """

    name: ClassVar[str] = "wandb"
    library: ClassVar[str] = "wandb"
    exempt: ClassVar = {"leaves-nothing": "wandb keeps its service for further runs of the process"}

    project: str = "distcore"
    """Project of the run; the run itself is named after the run folder."""

    mode: Literal["offline", "online"] = "offline"
    """offline: write to wandb/ in the run folder; online: upload while the run trains, too."""

    def open(self, run: Run, progress: Progress, known: str | None) -> str:
        """Begin a run of Weights & Biases, or go on with one, and give it the config."""
        # Else it asks a terminal for a missing key, and the other ranks wait for the answer.
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        out = Path(str(run.config.out)).absolute()
        identifier = known
        if known and not progress.step and self.mode == "offline":
            # `wandb sync` would upload both attempts.
            for folder in out.glob(f"wandb/offline-run-*-{known}"):
                shutil.rmtree(folder)
            identifier = None
        if identifier is None:
            # `secrets` draws nothing from the generators of the run.
            identifier = secrets.token_hex(4)
        # With None a server overwrites the run of that id, as an attempt that begins anew must.
        goes_on = self.mode == "online" and progress.step > 0
        self._run: wandb.Run = wandb.init(
            project=self.project,
            name=out.name,
            dir=str(out),
            id=identifier,
            resume="allow" if goes_on else None,
            mode=self.mode,
            config=run.config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off", init_timeout=PATIENCE),
        )
        if self.mode == "online":
            log.info("wandb: %s", self._run.url)
        return self._run.id

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add to the history; a server keeps its own values of a step from before a resume."""
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def text(self, name: str, value: str, step: int) -> None:
        """Put a text into the summary of the run."""
        self._run.summary[name] = value

    def close(self, finished: bool) -> None:
        """Wait until wandb's service has written every record."""
        self._run.finish()

"""The laboratory of an exporter's cases: the checkpoint of a small run."""

from __future__ import annotations

import inspect
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from distcore import RunConfig, TrainedModel, launch, load_config, train
from distcore.checkpoint import find
from distcore.lab import export_checkpoint
from distcore.registry import load
from distcore_workbench.kits import points

FACT = "rows that were made up for distcore check"
TASK_FILE = "how-to-read-rows.txt"
LIMIT = 60.0
CAPTURED = f"{__file__}:Captured"


class Captured:
    """An exporter that keeps what it is given."""

    last: ClassVar[TrainedModel]

    def __init__(self, trained: TrainedModel, to: Path, merged: bool) -> None:
        """Keep the model."""
        type(self).last = trained


@dataclass
class ExportLab:
    """The exporter, and a checkpoint."""

    name: str
    """Of its entry point, or ``file.py:Class``."""
    settings: Mapping[str, Any]
    """Config keys of the run by dotted name."""
    folder: Path
    """For the run, and for exports."""
    _numbers: Iterator[int] = field(default_factory=count)

    @cached_property
    def export(self) -> Callable[[TrainedModel, Path, bool], object]:
        """The exporter."""
        exporter: Callable[[TrainedModel, Path, bool], object] = load("exports", self.name)
        return exporter

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases that the exporter's module declares not to keep, with reasons."""
        module = inspect.getmodule(self.export)
        declared: Mapping[str, str] = getattr(module, "exempt", {})
        return declared

    @cached_property
    def run(self) -> Path:
        """The folder of a run that has ended."""
        run = self.folder / "run"
        usual = {
            "task": f"{points.__file__}:Points",
            "device": "cpu",
            "nproc": 1,
            "max_steps": 2,
            "out": str(run),
        }
        launch(
            _train,
            load_config(None, {**usual, "global_batch_size": 8, **self.settings}),
            nproc=1,
            timeout=LIMIT,
        )
        return run

    def trained(self, dtype: str = "fp32") -> TrainedModel:
        """Return a new model of the checkpoint, with one more fact and one more
        file of its task.
        """
        path = find("auto", self.run)
        assert path is not None  # the run has ended
        export_checkpoint(path, self.folder / "nowhere", None, False, CAPTURED, dtype)
        trained: TrainedModel = load("exports", CAPTURED).last

        def save_task_files(folder: Path) -> None:
            trained.save_task_files(folder)
            (folder / TASK_FILE).touch()

        return replace(
            trained,
            provenance={**trained.provenance, "rows": FACT},
            save_task_files=save_task_files,
        )

    def new_folder(self) -> Path:
        """Return the path of a folder that is not there yet, alone in its own."""
        above = self.folder / f"export-{next(self._numbers)}"
        above.mkdir()
        return above / "to"

    def exported(self, dtype: str = "fp32") -> Path:
        """Export the model to a new folder, and return it."""
        to = self.new_folder()
        self.export(self.trained(dtype), to, False)
        return to


def export_lab(name: str, settings: Mapping[str, Any], folder: Path) -> ExportLab:
    """Return the lab of an exporter, by its name or as ``file.py:Class``; raises DistcoreError if
    it is not there.
    """
    # else each export says the same
    logging.getLogger("distcore").addHandler(logging.NullHandler())
    lab = ExportLab(name, settings, folder)
    _ = lab.export
    return lab


def _train(config: RunConfig) -> None:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        train(config)

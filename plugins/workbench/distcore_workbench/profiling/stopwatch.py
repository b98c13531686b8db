"""Write ``steps.json`` to the run folder: when training began, each step's duration, and the
samples seen after it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from distcore import Progress, Run, hookimpl
from distcore.files import strict_json

Mark = float | torch.Event
"""A point in time: seconds on a CPU, an event in the device's queue elsewhere."""


@dataclass
class Stopwatch:
    """Time every optimizer step on the main rank; evaluations and checkpoints between
    steps do not count.

    On an accelerator the times are events in the device's queue, so that no step
    waits for the device.
    """

    file: str = "steps.json"
    """Path of the file, relative to the run folder."""

    def __post_init__(self) -> None:
        self._device = torch.device("cpu")
        self._began = 0.0
        self._samples: list[int] = []
        self._spans: list[tuple[Mark, Mark]] = []
        self._since: Mark = 0.0

    @hookimpl(trylast=True)
    def on_run_start(self, run: Run) -> None:
        """Note when training begins."""
        self._device = run.world.device
        self._began = time.monotonic()
        self._since = mark(self._device)

    @hookimpl(trylast=True)
    def on_step_end(self, progress: Progress) -> None:
        """Note the end of a step."""
        now = mark(self._device)
        self._spans.append((self._since, now))
        self._samples.append(progress.samples)
        self._since = now

    @hookimpl(trylast=True)
    def on_evaluation_end(self) -> None:
        """Leave the evaluation out of the next step."""
        self._since = mark(self._device)

    @hookimpl(trylast=True)
    def on_checkpoint(self) -> None:
        """Leave the checkpoint out of the next step."""
        self._since = mark(self._device)

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        """Write the file."""
        if not run.world.is_main:
            return
        facts = {
            "began": self._began,
            "threads": torch.get_num_threads(),
            "seconds": [seconds_between(*span) for span in self._spans],
            "samples": self._samples,
        }
        file = Path(str(run.config.out), self.file)
        file.write_text(strict_json(facts), encoding="utf-8")


def mark(device: torch.device) -> Mark:
    """Return the present point in time: on an accelerator, in the device's queue."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds from one point in time to another of the same kind;
    waits for the device.
    """
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start

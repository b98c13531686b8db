"""``steps.json`` in the run folder: when training began, how long each step took, and the samples seen after it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from distcore.files import strict_json
from distcore.plugin.contract import Progress, Run
from distcore.plugin.hookspecs import hookimpl

Mark = float | torch.cuda.Event


@dataclass
class Stopwatch:
    """Time every optimizer step, evaluations and checkpoints between them left out; on the main rank.

    On a GPU the marks are events in its own queue, so that no step waits for the device.
    """

    file: str = "steps.json"
    """Path of the file, relative to the run folder."""

    def __post_init__(self) -> None:
        self._on_gpu = False
        self._began = 0.0
        self._samples: list[int] = []
        self._spans: list[tuple[Mark, Mark]] = []
        self._since: Mark = 0.0

    @hookimpl(trylast=True)
    def on_run_start(self, run: Run) -> None:
        self._on_gpu = run.world.device.type == "cuda"
        self._began = time.monotonic()
        self._since = self._mark()

    @hookimpl(trylast=True)
    def on_step_end(self, progress: Progress) -> None:
        now = self._mark()
        self._spans.append((self._since, now))
        self._samples.append(progress.samples)
        self._since = now

    @hookimpl(trylast=True)
    def on_evaluation_end(self) -> None:
        self._since = self._mark()

    @hookimpl(trylast=True)
    def on_checkpoint(self) -> None:
        self._since = self._mark()

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        if not run.world.is_main:
            return
        facts = {
            "began": self._began,
            "threads": torch.get_num_threads(),
            "seconds": [_seconds(*span) for span in self._spans],
            "samples": self._samples,
        }
        Path(str(run.config.out), self.file).write_text(strict_json(facts), encoding="utf-8")

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start

"""Loss and speed between two log lines, without waiting for the device in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from distcore.contract import Progress, Run, StepResult
from distcore.hooks import Hooks
from distcore.loop import loss_shares


class Meter:
    """Counts training time, evaluations and saves left out, and the loss since the last log line."""

    def __init__(self, progress: Progress) -> None:
        self.seconds = 0.0
        """Training time since the start of this process."""
        self._first = self._last = progress
        self._seconds_at_last = 0.0
        self._loss: Tensor | float = 0.0
        self._running_since = time.perf_counter()

    def add(self, loss: Tensor) -> None:
        """Take in this rank's share of one step's loss."""
        self._loss = loss + self._loss

    def record(self, run: Run, hooks: Hooks, progress: Progress, result: StepResult) -> dict[str, float]:
        """Return a line of metrics.jsonl: the mean loss since the last one over all ranks, and the speed."""
        steps = progress.step - self._last.step
        mine = torch.as_tensor(self._loss, dtype=torch.float64, device=run.world.device).reshape(1)
        loss = hooks.reduce_loss(run, mine).item() / (loss_shares(run) * steps)
        self._tick()
        seconds = self.seconds - self._seconds_at_last
        record: dict[str, float] = {
            "step": progress.step,
            "epoch": progress.epoch,
            "samples": progress.samples,
            "loss": loss,
            "lr": run.optimizer.param_groups[0]["lr"] if run.optimizer else 0.0,
            "samples_per_second": (progress.samples - self._last.samples) / seconds,
        }
        if result.grad_norm is not None:
            record["grad_norm"] = float(result.grad_norm)
        self._last, self._seconds_at_last, self._loss = progress, self.seconds, 0.0
        return record

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        self._tick()
        yield
        self._running_since = time.perf_counter()

    def samples_per_second(self, progress: Progress) -> float:
        """Mean speed of the training done in this process."""
        self._tick()
        return (progress.samples - self._first.samples) / self.seconds if self.seconds else 0.0

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._running_since
        self._running_since = now

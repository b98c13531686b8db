"""Loss and speed between two log lines, without waiting for the device in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from distcore.engine.loop import loss_multiplier
from distcore.plugin.contract import Progress, Run, StepResult
from distcore.plugin.hooks import Hooks


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

    def record(
        self, run: Run, hooks: Hooks, progress: Progress, result: StepResult, asked: bool
    ) -> tuple[dict[str, float], bool]:
        """Return a line of metrics.jsonl, and whether any rank was ``asked`` to stop.

        The line: the mean loss since the last one over all ranks, and the speed. Both answers come from one sum over
        ranks, so that being ready to stop costs no collective.
        """
        steps = progress.step - self._last.step
        loss = torch.as_tensor(self._loss if run.world.speaks else 0.0, dtype=torch.float64, device=run.world.device)
        total, askers = hooks.reduce_loss(run, torch.stack([loss, loss.new_tensor(float(asked))])).tolist()
        self._tick()
        seconds = self.seconds - self._seconds_at_last
        record: dict[str, float] = {
            "step": progress.step,
            "epoch": round(progress.epoch + progress.step_in_epoch / run.steps_per_epoch, 4),
            "samples": progress.samples,
            "loss": total / (loss_multiplier(run) * steps),
            "lr": run.optimizer.param_groups[0]["lr"] if run.optimizer else 0.0,
            "samples_per_second": (progress.samples - self._last.samples) / seconds,
        }
        if result.grad_norm is not None:
            record["grad_norm"] = float(result.grad_norm)
        self._last, self._seconds_at_last, self._loss = progress, self.seconds, 0.0
        return record, askers > 0

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

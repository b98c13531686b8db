"""The time of a run by phase, on this rank: every moment belongs to one phase, so the phases add up to the clock."""

from __future__ import annotations

from collections import deque
from time import perf_counter

import torch

from distcore_workbench.observe.phases import PHASES
from distcore_workbench.profiling.stopwatch import mark, seconds_between

KEPT = 256
"""Spans of a device's queue that may wait; of more, those that are over are added up."""
OwnPart = tuple[float, float]
"""Seconds of a step in which no rank waits: data; and forward passes with the backward passes before the last one."""


def clock_of(device: torch.device, already: float) -> PhaseClock:
    """Return a clock of ``device``; of the host for one whose queue has no times. It takes over in ``starting``."""
    try:
        return PhaseClock(already) if device.type == "cpu" else QueueClock(device, already)
    except (RuntimeError, NotImplementedError):
        return PhaseClock(already)


class PhaseClock:
    """Adds up seconds by phase, of a rank on a CPU. A step calls it often, so it does little."""

    def __init__(self, already: float) -> None:
        """Begin in the phase ``starting``, which has lasted for ``already`` seconds."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds["starting"] = already
        self.phase = "starting"
        """The current phase."""
        self._since = perf_counter()
        self._steps: list[OwnPart] = []
        self._before_last = 0.0  # seconds of all backward passes before the last one
        self._own_before: OwnPart = (0.0, 0.0)

    def enter(self, phase: str) -> None:
        """End the current phase, and begin ``phase``."""
        now = perf_counter()
        if self.phase == "backward":
            self._before_last = self._seconds["backward"]
        self._seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now

    def end_step(self) -> None:
        """Note the end of an optimizer step."""
        seconds, (data, compute) = self._seconds, self._own_before
        self._steps.append((seconds["data"] - data, seconds["forward"] + self._before_last - compute))
        self._before_last = seconds["backward"]
        self._own_before = seconds["data"], seconds["forward"] + seconds["backward"]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every phase so far; waits for the device."""
        self._settle()
        return dict(self._seconds)

    def steps(self) -> list[OwnPart]:
        """Return, as of the last ``seconds``, the own part of each step since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def _settle(self) -> None:
        self.enter(self.phase)


class QueueClock(PhaseClock):
    """Adds up seconds of an accelerator: it marks the device's queue, and no step waits for the device."""

    def __init__(self, device: torch.device, already: float) -> None:
        """Begin as the other clock does."""
        super().__init__(already)
        self._device = device
        self._last = mark(device)
        self._pending: deque[tuple[str, torch.Event, torch.Event] | None] = deque()

    def enter(self, phase: str) -> None:
        """Mark the end of the current phase, and begin ``phase``."""
        now = mark(self._device)
        assert isinstance(now, torch.Event)
        assert isinstance(self._last, torch.Event)
        self._pending.append((self.phase, self._last, now))
        self.phase, self._last = phase, now
        while len(self._pending) > KEPT and ((first := self._pending[0]) is None or first[2].query()):
            self._take()

    def end_step(self) -> None:
        """Note the end of an optimizer step, once its spans are over."""
        self._pending.append(None)

    def _settle(self) -> None:
        self.enter(self.phase)
        while self._pending:
            self._take()

    def _take(self) -> None:
        span = self._pending.popleft()
        if span is None:
            super().end_step()
        else:
            phase, start, end = span
            if phase == "backward":
                self._before_last = self._seconds["backward"]
            self._seconds[phase] += seconds_between(start, end)

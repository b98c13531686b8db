"""The time of a run by phase, on this rank: every moment belongs to one phase, so the phases add up to the clock."""

from __future__ import annotations

from collections import deque

import torch

from distcore_workbench.observe.phases import PHASES
from distcore_workbench.profiling.stopwatch import mark, seconds_between

ALONE = "backward alone"
"""A backward pass before the last one of a step; its time is that of ``backward``."""
KEPT = 256
"""Spans of a device's queue that may wait; of more, those that are over are added up."""


class PhaseClock:
    """Adds up seconds by phase. On an accelerator it marks the device's queue, and no step waits for the device."""

    def __init__(self, device: torch.device, already: float) -> None:
        """Begin in the phase ``starting``, which has lasted for ``already`` seconds."""
        self._device = device
        self._seconds = dict.fromkeys((*PHASES, ALONE), 0.0)
        self._seconds["starting"] = already
        self._phase, self._since = "starting", mark(self._device)
        self._pending: deque[tuple[str, torch.Event, torch.Event] | None] = deque()
        self._steps: list[dict[str, float]] = []
        self._own_before = self._own()

    def enter(self, phase: str) -> None:
        """End the current phase, and begin ``phase``; ``ALONE`` is a backward pass that waits for no other rank."""
        now = mark(self._device)
        if isinstance(now, torch.Event) and isinstance(self._since, torch.Event):
            self._pending.append((self._phase, self._since, now))
        else:
            self._seconds[self._phase] += seconds_between(self._since, now)
        self._phase, self._since = phase, now
        while len(self._pending) > KEPT and ((first := self._pending[0]) is None or first[2].query()):
            self._take()

    def end_step(self) -> None:
        """Note the end of an optimizer step."""
        self._pending.append(None)
        if len(self._pending) == 1:
            self._take()

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._phase

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every phase so far; waits for the device."""
        self.enter(self._phase)
        while self._pending:
            self._take()
        seconds = {phase: self._seconds[phase] for phase in PHASES}
        seconds["backward"] += self._seconds[ALONE]
        return seconds

    def steps(self) -> list[dict[str, float]]:
        """Return, as of the last ``seconds``, the own part of each step since the last call, in which no rank waits.

        ``data``, and ``compute``: forward passes, and backward passes before the last one.
        """
        steps, self._steps = self._steps, []
        return steps

    def _own(self) -> dict[str, float]:
        return {"data": self._seconds["data"], "compute": self._seconds["forward"] + self._seconds[ALONE]}

    def _take(self) -> None:
        span = self._pending.popleft()
        if span is not None:
            phase, start, end = span
            self._seconds[phase] += seconds_between(start, end)
            return
        own = self._own()
        self._steps.append({part: each - self._own_before[part] for part, each in own.items()})
        self._own_before = own

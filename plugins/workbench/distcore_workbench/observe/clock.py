"""The time of a run by phase, on this rank: every moment belongs to one phase, so the phases
add up to the clock.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from time import perf_counter
from typing import NamedTuple

import torch

from distcore_workbench.observe.phases import PHASES
from distcore_workbench.profiling.stopwatch import mark, seconds_between

KEPT = 256
"""Spans of a device's queue that may wait; of more, those that are over are added up."""
OWN = ("data", "forward", "backward")
"""Phases in which a rank does what no other one waits for, but a step's last backward pass."""


class OwnPart(NamedTuple):
    """Seconds of a step in which no rank waits for another one, without those that other
    processes took its core.
    """

    data: float
    """Waiting for rows and collating them."""
    compute: float
    """Forward passes, and the backward passes before the last one."""
    data_taken: float
    """Seconds of ``data`` in which the rank could have run, and another process had its core."""
    compute_taken: float
    """Those of ``compute``."""


def clock_of(device: torch.device, already: float, ranks: int) -> PhaseClock:
    """Return a clock of ``device``; of the host for one whose queue has no times.

    It takes over in ``starting``.
    """
    is_compared = ranks > 1
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return QueueClock(device, already)
    return PhaseClock(already, is_compared)


class RunQueue:
    """The time in which this thread could have run, and the kernel let another
    process have its core.

    Linux counts it for each thread. On a machine that several jobs share it is most of what makes
    one rank slower than another for a while. Elsewhere it is 0.
    """

    def __init__(self, is_read: bool = True) -> None:
        """Begin to count; without ``is_read`` it stays 0, and costs nothing."""
        self._file, self._before = -1, 0
        if not is_read:
            return
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        self.seconds()

    def seconds(self) -> float:
        """Return the seconds since the last call."""
        if self._file == -1:
            return 0.0
        waited = int(os.pread(self._file, 80, 0).split()[1])
        since, self._before = waited - self._before, waited
        return since * 1e-9


class PhaseClock:
    """Adds up seconds by phase, of a rank on a CPU. A step calls it often, so it does little."""

    def __init__(self, already: float, is_compared: bool = True) -> None:
        """Begin in the phase ``starting``, which has lasted for ``already`` seconds.

        A rank that ``is_compared`` with others reads what other processes took of its core.
        """
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds["starting"] = already
        self.phase = "starting"
        """The current phase."""
        self._since = perf_counter()
        self._steps: list[OwnPart] = []
        self._before_last = 0.0  # seconds of all backward passes before the last one
        self._own_before = self._taken_before = (0.0, 0.0)
        self._queue = RunQueue(is_compared)
        self._taken = dict.fromkeys(OWN, 0.0)
        self._taken_before_last = 0.0

    def enter(self, phase: str) -> None:
        """End the current phase, and begin ``phase``."""
        now, taken = perf_counter(), self._queue.seconds()
        if self.phase == "backward":
            self._before_last = self._seconds["backward"]
            self._taken_before_last = self._taken["backward"]
        self._seconds[self.phase] += now - self._since
        if self.phase in self._taken:
            self._taken[self.phase] += taken
        self.phase, self._since = phase, now

    def end_step(self) -> None:
        """Note the end of an optimizer step."""
        seconds, (data, compute) = self._seconds, self._own_before
        taken, (data_taken, compute_taken) = self._taken, self._taken_before
        data_taken = taken["data"] - data_taken
        compute_taken = taken["forward"] + self._taken_before_last - compute_taken
        data = seconds["data"] - data - data_taken
        compute = seconds["forward"] + self._before_last - compute - compute_taken
        self._steps.append(OwnPart(data, compute, data_taken, compute_taken))
        self._before_last, self._taken_before_last = seconds["backward"], taken["backward"]
        self._own_before = seconds["data"], seconds["forward"] + seconds["backward"]
        self._taken_before = taken["data"], taken["forward"] + taken["backward"]

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
    """Adds up seconds of an accelerator: it marks the device's queue, and no step
    waits for the device.
    """

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
        while len(self._pending) > KEPT and (
            (first := self._pending[0]) is None or first[2].query()
        ):
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

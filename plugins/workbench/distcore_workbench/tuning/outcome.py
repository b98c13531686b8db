"""What came of a trial, and what trials have cost so far."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from distcore_workbench.tuning.settings import Setting

Kind = Literal["screen", "final", "fit"]
"""``screen``: short, without dropout, losses compared. ``final``: longer, as the job is. ``fit``: to the run's end."""
Result = Literal["ok", "out of memory", "failed", "too slow", "differs", "refused", "does not fit"]
"""How a trial ended; the last two were not started."""
LONGER = 1.5
"""How many times as long as a trial of the search one of the finals takes, about: used until one was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one trial."""

    result: Result
    """How it ended."""
    seconds: float = 0.0
    """From the start of its process to its end; 0 where none was started."""
    speed: float = 0.0
    """Samples per second over all ranks, start-up and warm-up left out."""
    times: tuple[float, ...] = ()
    """Seconds of each step that counts for ``speed``: the same steps with the same rows in every setting."""
    peak: int = 0
    """Peak memory in bytes of the rank that took most."""
    losses: tuple[float, ...] = ()
    """Mean loss of each of the first steps."""
    norms: tuple[float, ...] = ()
    """Norm of the gradient at each of these steps, where the strategy says it."""
    why: str = ""
    """One line on what went wrong."""


Measure = Callable[[Kind, Setting, int], Outcome]
"""Runs a trial of a setting; the number tells its repetitions apart."""


class Spending:
    """Measures, and counts the seconds."""

    def __init__(self, measure: Measure, budget: float) -> None:
        """``budget``: in seconds."""
        self._measure, self.budget = measure, budget
        self._times: dict[Kind, list[float]] = {}
        self.spent = 0.0

    def measure(self, kind: Kind, setting: Setting, number: int) -> Outcome:
        """Return what came of a trial."""
        found = self._measure(kind, setting, number)
        self.spent += found.seconds
        if found.seconds:
            self._times.setdefault(kind, []).append(found.seconds)
        return found

    def expected(self, kind: Kind) -> float:
        """Return the seconds that one more trial of this kind will take."""
        if kind in self._times:
            return statistics.mean(self._times[kind])
        return LONGER * self.expected("screen") if kind == "final" else 0.0

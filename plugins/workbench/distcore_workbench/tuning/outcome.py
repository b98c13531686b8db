"""The outcome of a trial, and the time that trials have taken so far."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from distcore_workbench.tuning.settings import Setting

Kind = Literal["screen", "final", "fit"]
"""``screen``: short, without dropout, losses compared. ``final``: longer, as the job is. ``fit``:
to the run's end.
"""
Result = Literal["ok", "out of memory", "failed", "too slow", "differs", "refused", "does not fit"]
"""The end of a trial. Trials with one of the last two results were not started."""
FINAL_LENGTH = 1.5
"""Assumed duration of a final trial relative to a screening trial, until one has been measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one trial."""

    result: Result
    """How the trial ended."""
    seconds: float = 0.0
    """From the start of the trial's process to its end; 0 if none was started."""
    speed: float = 0.0
    """Samples per second over all ranks, without start-up and warm-up."""
    times: tuple[float, ...] = ()
    """Seconds of each step that counts for ``speed``: the same steps with the same
    rows in every setting.
    """
    peak: int = 0
    """Peak memory in bytes of the rank with the most."""
    losses: tuple[float, ...] = ()
    """Mean loss of each of the first steps."""
    norms: tuple[float, ...] = ()
    """Norm of the gradient at each of these steps, if the strategy reports it."""
    why: str = ""
    """The reason of a failure, in one line."""


Measure = Callable[[Kind, Setting, int], Outcome]
"""Run a trial of a setting; the number distinguishes repetitions."""


class Spending:
    """Runs trials, and counts their seconds."""

    def __init__(self, measure: Measure, budget: float) -> None:
        """``budget``: in seconds."""
        self._measure, self.budget = measure, budget
        self._times: dict[Kind, list[float]] = {}
        self.spent = 0.0

    def measure(self, kind: Kind, setting: Setting, number: int) -> Outcome:
        """Run a trial, and return its outcome."""
        outcome = self._measure(kind, setting, number)
        self.spent += outcome.seconds
        if outcome.seconds:
            self._times.setdefault(kind, []).append(outcome.seconds)
        return outcome

    def expected(self, kind: Kind) -> float:
        """Return the expected seconds of one more trial of this kind."""
        if kind in self._times:
            return statistics.mean(self._times[kind])
        return FINAL_LENGTH * self.expected("screen") if kind == "final" else 0.0

"""Goodput of a run: the time of all its attempts, and which part of it was training that
its weights still have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from distcore_workbench.observe.phases import TRAINING
from distcore_workbench.observe.times import Moment, attempts_of

KINDS = ("training", "evaluating", "saving", "starting", "waiting for ranks", "lost", "not running")
"""Kinds of time; together they are the clock from the first start to the last sign of life.

``lost``: after the step that a later attempt began at. ``not running``: from the last line of an
attempt to the start of the next; a killed attempt leaves what it did since its last line here.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """The time of a run."""

    attempts: int
    """Starts of its ranks."""
    seconds: Mapping[str, float]
    """Seconds by kind."""

    @property
    def clock(self) -> float:
        """Seconds of all kinds."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        parts = []
        for kind, seconds in self.seconds.items():
            if seconds:
                parts.append(f"{kind} {seconds / self.clock:.1%}")
        attempts = f"{self.attempts} attempt{'s' * (self.attempts > 1)}"
        return f"time: {timedelta(seconds=round(self.clock))} in {attempts}: {', '.join(parts)}"


def goodput_of(folder: Path) -> Goodput | None:
    """Return the goodput of a run folder; ``None`` if the run was not observed,
    or has just begun.
    """
    attempts = attempts_of(folder)
    if not any(moment.seconds for attempt in attempts for moment in attempt):
        return None
    return Goodput(attempts=len(attempts), seconds=_seconds(attempts))


def _seconds(attempts: Sequence[Sequence[Moment]]) -> dict[str, float]:
    """Return the seconds of all attempts by ``KINDS``.

    What an attempt did after the step from which a later one went on is lost.
    """
    seconds = dict.fromkeys(KINDS, 0.0)
    starts = [attempt[0] for attempt in attempts]
    for number, attempt in enumerate(attempts):
        later_starts = starts[number + 1 :]
        last = attempt[-1]
        # The last moment whose steps no later attempt did again.
        lasting = attempt[0]
        for moment in attempt:
            if later_starts and moment.step > min(start.step for start in later_starts):
                break
            lasting = moment
        trained = sum(lasting.seconds.get(phase, 0.0) for phase in TRAINING)
        seconds["training"] += trained - lasting.waited
        seconds["waiting for ranks"] += lasting.waited
        seconds["evaluating"] += lasting.seconds.get("evaluation", 0.0)
        seconds["saving"] += lasting.seconds.get("save", 0.0)
        seconds["starting"] += last.seconds.get("starting", 0.0)
        lost = 0.0
        for phase, seconds_of_phase in last.seconds.items():
            if phase != "starting":
                lost += seconds_of_phase - lasting.seconds.get(phase, 0.0)
        seconds["lost"] += lost
        if later_starts:
            seconds["not running"] += max(0.0, later_starts[0].at - last.at)
    return seconds

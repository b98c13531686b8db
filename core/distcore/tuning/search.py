"""The search: one axis after the other by short runs, then the settings near the top again, in turns.

It starts nothing itself: ``measure`` does, and tests give one that computes. What it decides depends on what was
measured alone, so that a search which was interrupted is repeated from its table up to where it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from distcore.tuning.settings import Axis, Setting, key_of

Kind = Literal["screen", "final", "fit"]
"""``screen``: short, without dropout, losses compared. ``final``: longer, as the job is. ``fit``: to the run's end."""
Result = Literal["ok", "out of memory", "failed", "too slow", "differs", "refused", "does not fit"]
"""How a trial ended; the last two were not started."""

SCREENING = 0.6
"""Part of the budget for the search along the axes; the rest measures the best again."""
MARGIN = 1.02
"""How many times faster a setting must be to take the place of the best so far: less is noise."""
BEHIND = 0.7
"""Part of the best speed below which the others of a family are left out."""
FINALISTS = 4
"""Most settings that are measured again, beside the reference; fewer where there is no time for two rounds of them."""
LONGER = 1.5
"""How many times as long as a trial of the search one of the finals takes, about."""
ROUNDS = 5
"""Most times to measure them again."""
PASSES = 2
"""Times to go along all axes: a value that was slower at first may serve the setting that has won."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one trial."""

    result: Result
    """How it ended."""
    seconds: float = 0.0
    """From the start of its process to its end; 0 where none was started."""
    speed: float = 0.0
    """Samples per second over all ranks, start-up and warm-up left out."""
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


@dataclass(kw_only=True, slots=True)
class Finalist:
    """A setting that was measured again, in turns with others."""

    setting: Setting
    """What is set."""
    speeds: list[float] = field(default_factory=list)
    """Samples per second, one per round that went well."""

    @property
    def speed(self) -> float:
        """The median; 0 if no round went well."""
        return statistics.median(self.speeds) if self.speeds else 0.0

    @property
    def spread(self) -> float:
        """Highest less lowest, as a part of the median."""
        return (max(self.speeds) - min(self.speeds)) / self.speed if self.speeds else 0.0


class Search:
    """One search; ``spent`` counts the seconds of what was measured in it."""

    def __init__(self, measure: Measure, budget: float) -> None:
        """``budget``: in seconds."""
        self._measure, self._budget = measure, budget
        self._seen: dict[str, tuple[Setting, Outcome]] = {}
        self._times: list[float] = []
        self.spent = 0.0

    def run(self, axes: Sequence[Axis], fallbacks: Sequence[Setting]) -> list[Finalist]:
        """Return the settings that were measured last, the fastest first; none if no trial went well.

        ``fallbacks`` are tried in turn where the job as given does not run, until one does.
        """
        start = next((one for one in ({}, *fallbacks) if self._screen(one).result == "ok"), None)
        if start is None:
            return []
        best = self._along(axes, start)
        others = sorted(
            ((one, found) for one, found in self._seen.values() if found.result == "ok"),
            key=lambda pair: -pair[1].speed,
        )
        field = {key_of(one): one for one in (best, *(one for one, _ in others))}
        room = int((self._budget - self.spent) / (2 * LONGER * self._expected())) - 1
        return self._finals(list(field.values())[: min(FINALISTS, max(1, room))], start)

    def _along(self, axes: Sequence[Axis], best: Setting) -> Setting:
        """Go along the axes from ``best``, and return the fastest setting that was found."""
        for _ in range(PASSES):
            before = best
            for axis in axes:
                for setting, found in list(self._on(axis, best)):
                    if found.result == "ok" and found.speed > MARGIN * self._seen[key_of(best)][1].speed:
                        best = setting
            if key_of(before) == key_of(best):
                break
        return best

    def _on(self, axis: Axis, base: Setting) -> Iterator[tuple[Setting, Outcome]]:
        """Measure the values of an axis, each on top of ``base``, as long as there is time."""
        top = self._seen[key_of(base)][1].speed
        for family in axis.families:
            for value in family:
                if not self._has_time():
                    return
                setting = {**base, **value}
                found = self._screen(setting)
                yield setting, found
                top = max(top, found.speed)
                if found.result == "ok" and found.speed < BEHIND * top:
                    break

    def _screen(self, setting: Setting) -> Outcome:
        key = key_of(setting)
        if key not in self._seen:
            self._seen[key] = (setting, self._timed("screen", setting, 0))
        return self._seen[key][1]

    def _has_time(self) -> bool:
        return self.spent + self._expected() <= SCREENING * self._budget

    def _expected(self) -> float:
        return statistics.mean(self._times) if self._times else 0.0

    def _timed(self, kind: Kind, setting: Setting, number: int) -> Outcome:
        found = self._measure(kind, setting, number)
        self.spent += found.seconds
        if found.seconds:
            self._times.append(found.seconds)
        return found

    def _finals(self, field: Sequence[Setting], reference: Setting) -> list[Finalist]:
        """Measure the best in turns, every second round backwards; who is clearly slower leaves from round to round."""
        settings = {key_of(one): one for one in (*field, reference)}
        finalists = [Finalist(setting=one) for one in settings.values()]
        racing = finalists
        for number in range(1, ROUNDS + 1):
            if number > 1 and self.spent + len(racing) * self._expected() > self._budget:
                break
            for one in racing if number % 2 else racing[::-1]:
                found = self._timed("final", one.setting, number)
                if found.result == "ok":
                    one.speeds.append(found.speed)
            ranked = sorted((one for one in racing if len(one.speeds) == number), key=lambda one: -one.speed)
            # Half of the field leaves after each round, but nobody who may yet be the fastest.
            half = ranked[: max(2, -(-len(ranked) // 2))]
            stays = key_of(reference)
            racing = [
                one
                for one in ranked
                if one in half or max(one.speeds) >= min(ranked[0].speeds) or key_of(one.setting) == stays
            ]
            if not racing:
                break
        # Who has left was slower than those who stayed, whatever its few rounds say.
        measured = [one for one in finalists if one.speeds]
        if not measured:  # then what the search has seen must do
            return [Finalist(setting=field[0], speeds=[self._seen[key_of(field[0])][1].speed])]
        return sorted(measured, key=lambda one: (-len(one.speeds), -one.speed))


def fit(
    rungs: Sequence[Setting], larger: Callable[[Setting], Sequence[Setting]], measure: Measure, budget: float
) -> tuple[Setting, Outcome] | None:
    """Go down the rungs until a run fits, then up again in its micro-batch; return the setting, ``None`` if none fits.

    ``larger`` gives the settings with larger micro-batches than that of a rung, the largest first. No trial begins
    after those before it have taken ``budget`` seconds.
    """
    spent = 0.0
    for rung in rungs:
        found = measure("fit", rung, 0)
        spent += found.seconds
        if found.result == "ok":
            for setting in larger(rung) if spent < budget else ():
                more = measure("fit", setting, 0)
                spent += more.seconds
                if more.result == "ok":
                    return setting, more
                if spent >= budget:
                    break
            return rung, found
        if spent >= budget:
            return None
    return None

"""The search: one axis after the other by short runs, then the settings near the top again, in turns.

It starts nothing itself: ``measure`` does, and tests give one that computes. What it decides depends on what was
measured alone, so that a search which was interrupted is repeated from its table up to where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from distcore_workbench.tuning.finals import MARGIN, Finalist, race
from distcore_workbench.tuning.outcome import Measure, Outcome, Spending
from distcore_workbench.tuning.settings import Axis, Setting, key_of

SCREENING = 0.6
"""Part of the budget for the search along the axes; the rest measures the best again."""
BEHIND = 0.7
"""Part of the best speed below which the others of a family are left out, and it itself in the second pass."""
FINALISTS = 4
"""Most settings that are measured again, beside the reference; fewer where there is no time for two rounds of them."""
PASSES = 2
"""Times to go along all axes: a value that was slower at first may serve the setting that has won."""
TRIMMED = 5
"""One of so many steps is left out at either end, by how much faster it was: other programs disturbed it."""


class Search:
    """One search; ``spent`` counts the seconds of what was measured in it."""

    def __init__(self, measure: Measure, budget: float) -> None:
        """``budget``: in seconds."""
        self._spending = Spending(measure, budget)
        self._seen: dict[str, tuple[Setting, Outcome]] = {}
        self._tried: set[str] = set()  # values, whatever they were on top of
        self.untried: dict[str, None] = {}
        """Names of the axes with values for which there was no time, in order."""

    @property
    def spent(self) -> float:
        """Seconds of all trials so far."""
        return self._spending.spent

    def run(self, axes: Sequence[Axis], fallbacks: Sequence[Setting]) -> list[Finalist]:
        """Return the settings that were measured last, the fastest first; none if no trial went well.

        ``fallbacks`` are tried in turn where the job as given does not run, until one does.
        """
        start = next((one for one in ({}, *fallbacks) if self._screen(one).result == "ok"), None)
        if start is None:
            return []
        best = self._along(axes, start)
        room = int((self._spending.budget - self.spent) / (2 * self._spending.expected("final"))) - 1
        field = self._field(best)[: min(FINALISTS, max(1, room))]
        found = race([*field, start], self._spending)
        return found or [self._seen_only(best)]  # where no final went well, what the search has seen must do

    def _along(self, axes: Sequence[Axis], best: Setting) -> Setting:
        """Go along the axes from ``best``, and return the fastest setting that was found."""
        slow: set[str] = set()  # values that were far behind: not again on top of another setting
        for _ in range(PASSES):
            before = best
            for axis in axes:
                for value, setting in list(self._on(axis, best, slow)):
                    found = self._seen[key_of(setting)][1]
                    ahead = advantage(found, self._seen[key_of(best)][1])
                    if ahead > MARGIN:
                        best = setting
                    elif ahead < BEHIND and found.result != "out of memory":
                        slow.add(key_of(value))
            if key_of(before) == key_of(best):
                break
        return best

    def _on(self, axis: Axis, base: Setting, slow: set[str]) -> Iterator[tuple[Setting, Setting]]:
        """Measure the values of an axis, each on top of ``base``, as long as there is time; yield value and setting."""
        top = self._seen[key_of(base)][1].speed
        for family in axis.families:
            for value in family:
                if key_of(value) in slow:
                    break
                if not self._has_time():
                    if key_of(value) not in self._tried:
                        self.untried[axis.name] = None
                    return
                self._tried.add(key_of(value))
                setting = {**base, **value}
                found = self._screen(setting)
                yield value, setting
                top = max(top, found.speed)
                if found.result == "ok" and found.speed < BEHIND * top:
                    break

    def _field(self, best: Setting) -> list[Setting]:
        """Return what may be the fastest: the best, then the best on each other number of ranks, then the others.

        What else runs on a machine slows one number of ranks down more than another, so one trial says little there.
        """
        top = self._seen[key_of(best)][1]
        order = sorted(((advantage(found, top), one) for one, found in self._seen.values()), key=lambda pair: -pair[0])
        good = [one for ahead, one in order if ahead > BEHIND]
        others = {_ranks(one): one for one in reversed(good) if _ranks(one) != _ranks(best)}
        return list({key_of(one): one for one in (best, *others.values(), *good)}.values())

    def _screen(self, setting: Setting) -> Outcome:
        key = key_of(setting)
        if key not in self._seen:
            self._seen[key] = (setting, self._spending.measure("screen", setting, 0))
        return self._seen[key][1]

    def _has_time(self) -> bool:
        return self.spent + self._spending.expected("screen") <= SCREENING * self._spending.budget

    def _seen_only(self, setting: Setting) -> Finalist:
        found = self._seen[key_of(setting)][1]
        return Finalist(setting=setting, speeds=[found.speed], rounds=[found.times])


def advantage(one: Outcome, other: Outcome) -> float:
    """Return how many times as fast one trial was as another, both of the same steps; 0 if it did not go well.

    The steps whose ratio is furthest from the others' are left out.
    """
    if one.result != "ok":
        return 0.0
    pairs = sorted(zip(one.times, other.times, strict=False), key=lambda pair: pair[1] / pair[0])
    cut = len(pairs) // TRIMMED
    kept = pairs[cut : len(pairs) - cut]
    return sum(theirs for _, theirs in kept) / sum(mine for mine, _ in kept)


def _ranks(setting: Setting) -> int | None:
    return setting.get("nproc")


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

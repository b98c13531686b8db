"""The search: short trials along one axis after another, then a race of the best settings.

The search only decides; ``measure`` runs the trials. Its decisions depend on measured outcomes
alone, so an interrupted search repeats itself from the recorded trials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from distcore_workbench.tuning.outcome import Measure, Outcome, Spending
from distcore_workbench.tuning.racing import MARGIN, Finalist, race
from distcore_workbench.tuning.settings import Axis, Setting, setting_key

SCREENING = 0.6
"""Fraction of the budget for the search along the axes. The rest is for the race."""
HOPELESS_FRACTION = 0.7
"""Skip a family's remaining values once one is slower than this fraction of the best; do not retry
it in pass two.
"""
FINALISTS = 4
"""Maximum number of settings in the race, without the reference; fewer if the budget does
not allow two rounds.
"""
PASSES = 2
"""Passes over all axes: a value that was slower at first may be faster on top of
the new best setting.
"""
TRIMMED = 5
"""A speedup drops one in this many steps at either end of the sorted ratios, because
other programs disturb steps.
"""


class Search:
    """One search; ``spent`` counts the seconds of its trials."""

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
        """Return the settings of the race, the fastest first; none if no trial succeeded.

        If the job as given does not run, ``fallbacks`` are tried in turn until one does.
        """
        start = next((one for one in ({}, *fallbacks) if self._screen(one).result == "ok"), None)
        if start is None:
            return []
        best = self._search_axes(axes, start)
        room = (
            int((self._spending.budget - self.spent) / (2 * self._spending.expected("final"))) - 1
        )
        candidates = self._candidates(best)[: min(FINALISTS, max(1, room))]
        finalists = race([*candidates, start], self._spending)
        # if all final trials failed, use the screening trial
        return finalists or [self._screened_only(best)]

    def _search_axes(self, axes: Sequence[Axis], best: Setting) -> Setting:
        """Search along the axes from ``best``, and return the fastest setting."""
        # values that were far slower, and are not tried on top of another setting
        slow: set[str] = set()
        for _ in range(PASSES):
            before = best
            for axis in axes:
                for value, setting in list(self._measure_axis(axis, best, slow)):
                    outcome = self._seen[setting_key(setting)][1]
                    ratio = speedup(outcome, self._seen[setting_key(best)][1])
                    if ratio > MARGIN:
                        best = setting
                    elif ratio < HOPELESS_FRACTION and outcome.result != "out of memory":
                        slow.add(setting_key(value))
            if setting_key(before) == setting_key(best):
                break
        return best

    def _measure_axis(
        self, axis: Axis, base: Setting, slow: set[str]
    ) -> Iterator[tuple[Setting, Setting]]:
        """Measure the values of an axis on top of ``base`` while there is time. Yield each
        value and its setting.
        """
        top = self._seen[setting_key(base)][1].speed
        for family in axis.families:
            for value in family:
                setting = {**base, **value}
                if setting_key(value) in slow or not axis.possible(setting):
                    break
                if not self._has_time():
                    if setting_key(value) not in self._tried:
                        self.untried[axis.name] = None
                    return
                self._tried.add(setting_key(value))
                outcome = self._screen(setting)
                yield value, setting
                top = max(top, outcome.speed)
                if outcome.result == "ok" and outcome.speed < HOPELESS_FRACTION * top:
                    break

    def _candidates(self, best: Setting) -> list[Setting]:
        """Return candidates for the race: the best, then the best for each other number of
        ranks, then the others.

        Other programs slow some numbers of ranks down more than others, so a single trial
        is weak evidence there.
        """
        top = self._seen[setting_key(best)][1]
        ratios = [(speedup(outcome, top), setting) for setting, outcome in self._seen.values()]
        good = [
            setting
            for ratio, setting in sorted(ratios, key=lambda pair: -pair[0])
            if ratio > HOPELESS_FRACTION
        ]
        others = {_ranks(one): one for one in reversed(good) if _ranks(one) != _ranks(best)}
        return list({setting_key(one): one for one in (best, *others.values(), *good)}.values())

    def _screen(self, setting: Setting) -> Outcome:
        key = setting_key(setting)
        if key not in self._seen:
            self._seen[key] = (setting, self._spending.measure("screen", setting, 0))
        return self._seen[key][1]

    def _has_time(self) -> bool:
        return self.spent + self._spending.expected("screen") <= SCREENING * self._spending.budget

    def _screened_only(self, setting: Setting) -> Finalist:
        outcome = self._seen[setting_key(setting)][1]
        return Finalist(setting=setting, speeds=[outcome.speed], rounds=[outcome.times])


def speedup(one: Outcome, other: Outcome) -> float:
    """Return the speed of one trial divided by that of another, over the same steps; 0
    if the trial failed.

    The steps with the most extreme ratios are left out.
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
    fallbacks: Sequence[Setting],
    larger: Callable[[Setting], Sequence[Setting]],
    measure: Measure,
    budget: float,
) -> tuple[Setting, Outcome] | None:
    """Try the fallbacks until one fits, then larger micro-batches; return the setting,
    ``None`` if none fits.

    ``larger`` maps a setting to settings with larger micro-batches, the largest first. No trial
    begins after the earlier ones have taken ``budget`` seconds.
    """
    spent = 0.0
    for fallback in fallbacks:
        outcome = measure("fit", fallback, 0)
        spent += outcome.seconds
        if outcome.result == "ok":
            for setting in larger(fallback) if spent < budget else ():
                more = measure("fit", setting, 0)
                spent += more.seconds
                if more.result == "ok":
                    return setting, more
                if spent >= budget:
                    break
            return fallback, outcome
        if spent >= budget:
            return None
    return None

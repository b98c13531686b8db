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
"""Speed, as a fraction of the best, below which a value is given up.

The remaining values of its family are skipped, and it is not tried again in the second pass.
"""
FINALISTS = 4
"""Maximum number of settings in the race, without the reference.

They are fewer if the budget does not allow two rounds.
"""
PASSES = 2
"""Passes over all axes: a value that was slower may be faster on top of the new best setting."""
TRIMMED = 5
"""A speedup drops one in this many steps at either end of the sorted ratios.

Other programs disturb single steps.
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
        start = self._first_that_runs([{}, *fallbacks])
        if start is None:
            return []
        best = self._search_axes(axes, start)
        seconds_left = self._spending.budget - self.spent
        # Two rounds at least, in which the start runs, too.
        affordable = int(seconds_left / (2 * self._spending.expected("final"))) - 1
        count = min(FINALISTS, max(1, affordable))
        candidates = self._candidates(best)[:count]
        finalists = race([*candidates, start], self._spending)
        # If all final trials failed, use the screening trial.
        return finalists or [self._screened_only(best)]

    def _first_that_runs(self, settings: Sequence[Setting]) -> Setting | None:
        """Screen settings in turn until one runs, and return it; ``None`` if none does."""
        for setting in settings:
            if self._screen(setting).result == "ok":
                return setting
        return None

    def _search_axes(self, axes: Sequence[Axis], best: Setting) -> Setting:
        """Search along the axes from ``best``, and return the fastest setting."""
        # values that were far slower, and are not tried on top of another setting
        slow: set[str] = set()
        for _ in range(PASSES):
            best_before = best
            for axis in axes:
                # As a list: all values are measured on top of the best setting before them.
                for value, setting in list(self._measure_axis(axis, best, slow)):
                    outcome = self._outcome_of(setting)
                    ratio = speedup(outcome, self._outcome_of(best))
                    if ratio > MARGIN:
                        best = setting
                    elif ratio < HOPELESS_FRACTION and outcome.result != "out of memory":
                        slow.add(setting_key(value))
            if setting_key(best_before) == setting_key(best):
                break
        return best

    def _measure_axis(
        self, axis: Axis, base: Setting, slow: set[str]
    ) -> Iterator[tuple[Setting, Setting]]:
        """Measure the values of an axis on top of ``base`` while there is time.

        Yield each value and its setting.
        """
        top_speed = self._outcome_of(base).speed
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
                top_speed = max(top_speed, outcome.speed)
                if outcome.result == "ok" and outcome.speed < HOPELESS_FRACTION * top_speed:
                    break

    def _candidates(self, best: Setting) -> list[Setting]:
        """Return candidates for the race: the best, the best per number of ranks, the others.

        Other programs slow some numbers of ranks down more than others, so a single trial
        is weak evidence there.
        """
        outcome_of_best = self._outcome_of(best)
        good = []
        for setting, outcome in self._seen.values():
            ratio = speedup(outcome, outcome_of_best)
            if ratio > HOPELESS_FRACTION:
                good.append((ratio, setting))
        good.sort(key=lambda pair: -pair[0])
        by_speed = [setting for _, setting in good]
        best_by_ranks: dict[int | None, Setting] = {}
        # The slowest first: the fastest of a number of ranks is the last to be written.
        for setting in reversed(by_speed):
            if _ranks(setting) != _ranks(best):
                best_by_ranks[_ranks(setting)] = setting
        ordered = [best, *best_by_ranks.values(), *by_speed]
        return list({setting_key(setting): setting for setting in ordered}.values())

    def _outcome_of(self, setting: Setting) -> Outcome:
        """Return the outcome of a setting that has been screened."""
        return self._seen[setting_key(setting)][1]

    def _screen(self, setting: Setting) -> Outcome:
        """Return the outcome of a short trial, which is run unless it was run before."""
        key = setting_key(setting)
        if key not in self._seen:
            self._seen[key] = (setting, self._spending.measure("screen", setting, 0))
        return self._outcome_of(setting)

    def _has_time(self) -> bool:
        """Return True if one more short trial ends within its part of the budget."""
        expected_end = self.spent + self._spending.expected("screen")
        return expected_end <= SCREENING * self._spending.budget

    def _screened_only(self, setting: Setting) -> Finalist:
        """Return a finalist whose only round is its short trial."""
        outcome = self._outcome_of(setting)
        return Finalist(setting=setting, speeds=[outcome.speed], rounds=[outcome.times])


def speedup(one: Outcome, other: Outcome) -> float:
    """Return the speed of one trial divided by that of another; 0 if the trial failed.

    Compared are the same steps, without those of the most extreme ratios.
    """
    if one.result != "ok":
        return 0.0
    # Not strict: a trial that ran longer has more steps.
    pairs = list(zip(one.times, other.times, strict=False))
    pairs.sort(key=lambda pair: pair[1] / pair[0])
    trimmed = len(pairs) // TRIMMED
    middle = pairs[trimmed : len(pairs) - trimmed]
    seconds = sum(step_seconds for step_seconds, _ in middle)
    other_seconds = sum(step_seconds for _, step_seconds in middle)
    return other_seconds / seconds


def _ranks(setting: Setting) -> int | None:
    """Return the number of ranks that a setting asks for; ``None``: that of the job."""
    return setting.get("nproc")


def fit(
    fallbacks: Sequence[Setting],
    larger: Callable[[Setting], Sequence[Setting]],
    measure: Measure,
    budget: float,
) -> tuple[Setting, Outcome] | None:
    """Try the fallbacks until one fits, then larger micro-batches.

    Return the setting and its outcome; ``None`` if none fits. ``larger`` maps a setting to settings
    with larger micro-batches, the largest first. No trial begins after the earlier ones have taken
    ``budget`` seconds.
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

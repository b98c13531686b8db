"""Race the best settings: measure them in rounds, and eliminate the slower ones, until one is left
or time is over.

All settings step over the same rows, so equal steps are compared. Other programs only ever make a
step longer, so the shortest time of each step over the rounds counts, as in Python's ``timeit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distcore_workbench.tuning.outcome import Spending
from distcore_workbench.tuning.settings import Setting, changes_in, setting_key

Times = Sequence[float]
"""Seconds of each step of a trial."""
ROUNDS = 7
"""Maximum number of rounds."""
MARGIN = 1.02
"""Smallest ratio of speeds that counts as a difference: less is not worth a change."""
HOPELESS = 1.25
"""Ratio to the leader's speed above which a setting is eliminated after the first round."""


@dataclass(kw_only=True, slots=True)
class Finalist:
    """A setting in the race."""

    setting: Setting
    """The setting."""
    speeds: list[float] = field(default_factory=list)
    """Samples per second, one number for each successful round."""
    rounds: list[Times] = field(default_factory=list)
    """Seconds of each step, for each successful round."""

    @property
    def speed(self) -> float:
        """Samples per second, with the shortest time of each step over the rounds;
        0 if no round succeeded.
        """
        return self.speeds[0] * sum(self.rounds[0]) / fastest(self.rounds) if self.speeds else 0.0

    @property
    def spread(self) -> float:
        """Highest minus lowest speed of a round, as a fraction of the highest."""
        return (max(self.speeds) - min(self.speeds)) / max(self.speeds) if self.speeds else 0.0


def fastest(rounds: Sequence[Times]) -> float:
    """Return the seconds of all steps, with the shortest time of each step over the rounds."""
    return float(sum(map(min, zip(*rounds, strict=True))))


def times_faster(one: Finalist, other: Finalist) -> float:
    """Return the speed of ``one`` divided by that of ``other``, from the rounds
    that both have run.
    """
    common = min(len(one.rounds), len(other.rounds))
    return fastest(other.rounds[:common]) / fastest(one.rounds[:common])


def is_told_apart(one: Finalist, other: Finalist) -> bool:
    """Return True if ``one`` is faster by more than the margin, and remains faster
    without any single round.
    """
    common = range(min(len(one.rounds), len(other.rounds)))
    if times_faster(one, other) < MARGIN:
        return False
    without = [
        [
            [times for at, times in zip(common, both.rounds, strict=False) if at != out]
            for both in (one, other)
        ]
        for out in common
        if len(common) > 1
    ]
    return all(fastest(mine) < fastest(theirs) for mine, theirs in without)


def race(settings: Sequence[Setting], spending: Spending) -> list[Finalist]:
    """Measure settings in rounds, every second one in reverse order; return the
    finalists, the fastest first.

    A setting is eliminated when the leader is faster beyond doubt. Eliminated settings come last.
    """
    finalists = [
        Finalist(setting=one) for one in {setting_key(one): one for one in settings}.values()
    ]
    racing = finalists
    for number in range(1, ROUNDS + 1):
        if (
            number > 1
            and spending.spent + len(racing) * spending.expected("final") > spending.budget
        ):
            break
        for one in racing if number % 2 else racing[::-1]:
            outcome = spending.measure("final", one.setting, number)
            if outcome.result == "ok":
                one.speeds.append(outcome.speed)
                one.rounds.append(outcome.times)
        racing = _still_racing([one for one in racing if len(one.rounds) == number])
        if not racing or (number > 1 and len(racing) == 1):
            break
    return sorted(
        (one for one in finalists if one.rounds), key=lambda one: (-len(one.rounds), -one.speed)
    )


def _still_racing(racing: Sequence[Finalist]) -> list[Finalist]:
    """Return the settings that may still be the fastest. After one round,
    only large differences eliminate.
    """
    if not racing:
        return []
    leader = max(racing, key=lambda one: one.speed)
    if len(leader.rounds) == 1:
        return [one for one in racing if times_faster(leader, one) < HOPELESS]
    return [one for one in racing if one is leader or not is_told_apart(leader, one)]


def choose_final(finals: Sequence[Finalist]) -> tuple[Finalist, list[Finalist]]:
    """Choose a setting, and return it with all settings that may be as fast as the fastest.

    Among those, the choice is the setting with the fewest changes to the job. ``finals`` is the
    nonempty result of ``race``.
    """
    first = finals[0]
    close = [one for one in finals if one is first or not is_told_apart(first, one)]
    return min(close, key=lambda one: changes_in(one.setting)), close

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
        """Samples per second, with the shortest time of each step; 0 if no round succeeded."""
        if not self.speeds:
            return 0.0
        # Every round steps over the same samples.
        return self.speeds[0] * sum(self.rounds[0]) / fastest(self.rounds)

    @property
    def spread(self) -> float:
        """Highest minus lowest speed of a round, as a fraction of the highest."""
        if not self.speeds:
            return 0.0
        return (max(self.speeds) - min(self.speeds)) / max(self.speeds)


def fastest(rounds: Sequence[Times]) -> float:
    """Return the seconds of all steps, with the shortest time of each step over the rounds."""
    shortest_times = [min(times_of_step) for times_of_step in zip(*rounds, strict=True)]
    return float(sum(shortest_times))


def times_faster(one: Finalist, other: Finalist) -> float:
    """Return the speed of ``one`` divided by that of ``other``, from the rounds both have run."""
    common = min(len(one.rounds), len(other.rounds))
    return fastest(other.rounds[:common]) / fastest(one.rounds[:common])


def is_told_apart(one: Finalist, other: Finalist) -> bool:
    """Return True if ``one`` is faster by more than the margin, whichever round is left out."""
    if times_faster(one, other) < MARGIN:
        return False
    common = min(len(one.rounds), len(other.rounds))
    if common < 2:  # without its only round there is nothing to compare
        return True
    for left_out in range(common):
        seconds = fastest(_without_round(one.rounds[:common], left_out))
        other_seconds = fastest(_without_round(other.rounds[:common], left_out))
        if seconds >= other_seconds:
            return False
    return True


def _without_round(rounds: Sequence[Times], left_out: int) -> list[Times]:
    """Return the rounds without that of number ``left_out``, from 0."""
    return [*rounds[:left_out], *rounds[left_out + 1 :]]


def race(settings: Sequence[Setting], spending: Spending) -> list[Finalist]:
    """Measure settings in rounds, and return the finalists, the fastest first.

    Every second round is in reverse order. A setting is eliminated when the leader is faster beyond
    doubt. Eliminated settings come last.
    """
    distinct = {setting_key(setting): setting for setting in settings}
    finalists = [Finalist(setting=setting) for setting in distinct.values()]
    racing = finalists
    for number in range(1, ROUNDS + 1):
        seconds_of_round = len(racing) * spending.expected("final")
        if number > 1 and spending.spent + seconds_of_round > spending.budget:
            break
        for finalist in racing if number % 2 else racing[::-1]:
            outcome = spending.measure("final", finalist.setting, number)
            if outcome.result == "ok":
                finalist.speeds.append(outcome.speed)
                finalist.rounds.append(outcome.times)
        successful = [finalist for finalist in racing if len(finalist.rounds) == number]
        racing = _still_racing(successful)
        if not racing or (number > 1 and len(racing) == 1):
            break
    measured = [finalist for finalist in finalists if finalist.rounds]
    measured.sort(key=lambda finalist: finalist.speed, reverse=True)
    # Stable: of those with as many rounds the fastest stays first.
    measured.sort(key=lambda finalist: len(finalist.rounds), reverse=True)
    return measured


def _still_racing(racing: Sequence[Finalist]) -> list[Finalist]:
    """Return the settings that may still be the fastest.

    After one round, only large differences eliminate.
    """
    if not racing:
        return []
    leader = max(racing, key=lambda finalist: finalist.speed)
    remaining = []
    for finalist in racing:
        if len(leader.rounds) == 1:
            may_win = times_faster(leader, finalist) < HOPELESS
        else:
            may_win = finalist is leader or not is_told_apart(leader, finalist)
        if may_win:
            remaining.append(finalist)
    return remaining


def choose_final(finals: Sequence[Finalist]) -> tuple[Finalist, list[Finalist]]:
    """Choose a setting, and return it with all settings that may be as fast as the fastest.

    Among those, the choice is the setting with the fewest changes to the job. ``finals`` is the
    nonempty result of ``race``.
    """
    first = finals[0]
    close = [final for final in finals if final is first or not is_told_apart(first, final)]
    return min(close, key=lambda final: changes_in(final.setting)), close

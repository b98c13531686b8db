"""The finals: the best settings again and again in turns, until the fastest is told apart or time is over.

All step over the same rows, so the time of a step is compared with that of the same step. Other programs only ever make
a step longer: of several rounds the shortest time of each step counts, as in Python's ``timeit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distcore_workbench.tuning.outcome import Spending
from distcore_workbench.tuning.settings import Setting, changes_in, key_of

Times = Sequence[float]
"""Seconds of each step of a trial."""
ROUNDS = 7
"""Most rounds."""
MARGIN = 1.02
"""How many times faster one setting must be than another to be told apart from it: less is not worth a change."""
HOPELESS = 1.25
"""How many times as fast as a setting the leader of the first round must be for it to leave at once."""


@dataclass(kw_only=True, slots=True)
class Finalist:
    """A setting that was measured in rounds."""

    setting: Setting
    """What is set."""
    speeds: list[float] = field(default_factory=list)
    """Samples per second, one per round that went well."""
    rounds: list[Times] = field(default_factory=list)
    """Seconds of each step, for each of these."""

    @property
    def speed(self) -> float:
        """Samples per second with each step as in the round in which it was shortest; 0 if no round went well."""
        return self.speeds[0] * sum(self.rounds[0]) / fastest(self.rounds) if self.speeds else 0.0

    @property
    def spread(self) -> float:
        """Highest less lowest speed of a round, as a part of the highest."""
        return (max(self.speeds) - min(self.speeds)) / max(self.speeds) if self.speeds else 0.0


def fastest(rounds: Sequence[Times]) -> float:
    """Return the seconds of all steps, each as in the round in which it was shortest."""
    return float(sum(map(min, zip(*rounds, strict=True))))


def times_faster(one: Finalist, other: Finalist) -> float:
    """Return how many times as fast as ``other`` a setting is, by the rounds in which both were measured."""
    common = min(len(one.rounds), len(other.rounds))
    return fastest(other.rounds[:common]) / fastest(one.rounds[:common])


def is_told_apart(one: Finalist, other: Finalist) -> bool:
    """Return True if ``one`` is faster by more than the margin, and faster still whichever round is left out."""
    common = range(min(len(one.rounds), len(other.rounds)))
    if times_faster(one, other) < MARGIN:
        return False
    without = [[[times for at, times in zip(common, both.rounds, strict=False) if at != out] for both in (one, other)]
               for out in common if len(common) > 1]  # fmt: skip
    return all(fastest(mine) < fastest(theirs) for mine, theirs in without)


def race(settings: Sequence[Setting], spending: Spending) -> list[Finalist]:
    """Measure settings in turns, every second round backwards, and return those that went well, the fastest first.

    A setting leaves when the leader is told apart from it. Those that left come behind those that stayed.
    """
    finalists = [Finalist(setting=one) for one in {key_of(one): one for one in settings}.values()]
    racing = finalists
    for number in range(1, ROUNDS + 1):
        if number > 1 and spending.spent + len(racing) * spending.expected("final") > spending.budget:
            break
        for one in racing if number % 2 else racing[::-1]:
            found = spending.measure("final", one.setting, number)
            if found.result == "ok":
                one.speeds.append(found.speed)
                one.rounds.append(found.times)
        racing = _staying([one for one in racing if len(one.rounds) == number])
        if not racing or (number > 1 and len(racing) == 1):
            break
    return sorted((one for one in finalists if one.rounds), key=lambda one: (-len(one.rounds), -one.speed))


def _staying(racing: Sequence[Finalist]) -> list[Finalist]:
    """Return those that may yet be the fastest; one round alone tells of large differences only."""
    if not racing:
        return []
    leader = max(racing, key=lambda one: one.speed)
    if len(leader.rounds) == 1:
        return [one for one in racing if times_faster(leader, one) < HOPELESS]
    return [one for one in racing if one is leader or not is_told_apart(leader, one)]


def chosen_of(finals: Sequence[Finalist]) -> tuple[Finalist, list[Finalist]]:
    """Return what to take, and whom the rounds do not tell apart from the fastest, itself included.

    Of these it is the one that changes least of the job as given. ``finals``: as ``race`` returns them, not empty.
    """
    first = finals[0]
    close = [one for one in finals if one is first or not is_told_apart(first, one)]
    return min(close, key=lambda one: changes_in(one.setting)), close

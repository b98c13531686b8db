"""Ranks that are slower than the others: by the own part of their steps, in which they wait
for no other rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import sqrt
from statistics import median, median_low
from typing import NamedTuple

WINDOW, LONG_WINDOW = 30, 150
"""Steps that are compared, at least: of a rank whose steps take alike, and of
one whose steps vary.
"""
STEADY = 0.07
"""The spread of a rank's steps up to which they take alike, as a part of their median."""
ABOVE, NO_LONGER = 0.10, 0.05
"""How far above the median of all ranks the own part of a rank's steps is before the rank is named;
and below which it is slow no longer. Between the two nothing is new.
"""
LEAST = 0.002
"""Seconds of a step above the median that are worth a line: what else a machine does
makes short steps differ.
"""
PARTS = ("data", "compute")
"""The own part of a step: waiting for rows and collating them; forward passes, and all backward
passes but the last.
"""
DEVIATION = 1.4826
"""Standard deviation of a normal distribution whose median absolute deviation is 1."""

FEW = 10
"""Lines from which on their differences tell the spread of steps; of fewer, only what a rank sends
of each tells it.
"""

Sent = Mapping[str, float]
"""What a rank sends of the steps of one log line: medians of the parts, and
``spread`` of their sums.
"""


class Line(NamedTuple):
    """What a rank has sent with one log line."""

    steps: int
    """Number of steps."""
    sent: Sent
    """Medians of a step."""
    own: float
    """Seconds of its own part, all parts together."""


class Stragglers:
    """Compares ranks by the median of their steps, which one step that was
    disturbed does not move.
    """

    def __init__(self) -> None:
        self._lines: dict[int, deque[Line]] = {}
        self._named: set[int] = set()

    def add(self, news: Mapping[int, Sent], steps: int) -> list[str]:
        """Add the seconds of a step that ranks sent, each the median of so many steps; return a
        line for each slow one.

        A rank whose steps vary is watched for longer: what else a machine does makes them vary, and
        lasts for a while. A rank is named again only after it was no slower than the others.
        """
        for rank, sent in news.items():
            lines = self._lines.setdefault(rank, deque())
            lines.append(Line(steps, sent, sum(sent[part] for part in PARTS)))
            while _steps_of(lines) - lines[0].steps >= LONG_WINDOW:
                lines.popleft()
        if len(self._lines) < 2:
            return []
        steady = {rank for rank, lines in self._lines.items() if _is_steady(lines)}
        return [
            *self._judge(WINDOW, steady),
            *self._judge(LONG_WINDOW, self._lines.keys() - steady),
        ]

    def _judge(self, length: int, ranks: Collection[int]) -> Iterator[str]:
        """Judge these ranks by so many of their last steps; yield a line for each that
        is slow since now.
        """
        if not ranks or any(_steps_of(lines) < length for lines in self._lines.values()):
            return
        window = Window(self._lines, length)
        for rank in sorted(ranks):
            if rank not in self._named and window.is_slow(rank):
                self._named.add(rank)
                yield window.line(rank)
            elif window.excess(rank) < NO_LONGER:
                self._named.discard(rank)


class Window:
    """The last steps of all ranks, compared."""

    def __init__(self, lines: Mapping[int, Sequence[Line]], length: int) -> None:
        """Take so many of the last steps, at least, from the ``lines`` of each rank."""
        self._lines = {rank: _last(each, length) for rank, each in lines.items()}
        self._medians = {
            rank: median(line.own for line in each) for rank, each in self._lines.items()
        }
        self._length = length
        # Of two ranks the faster is usual.
        self._usual = max(median_low(self._medians.values()), 1e-9)

    def excess(self, rank: int) -> float:
        """Return by how much a rank is slower than the median rank, as a part
        of that one's time.
        """
        return self._medians[rank] / self._usual - 1

    def is_slow(self, rank: int) -> bool:
        """Return True if a rank is slower than the others by enough, and was slower in each
        part of the window.
        """
        is_above = self.excess(rank) > max(ABOVE, LEAST / self._usual)
        return is_above and _least_third(self._lines[rank]) > (1 + NO_LONGER) * self._usual

    def line(self, rank: int) -> str:
        """Return the line about a slow rank, with the part of its steps that makes it slow."""
        above = {part: self._above(rank, part) for part in PARTS}
        takes = (
            f"its own part of a step takes {self._medians[rank] * 1e3:.1f} ms,"
            f" {self.excess(rank):.0%} above"
        )
        of_ranks = f"the median of {len(self._lines)} ranks over {self._length} steps"
        return (
            f"rank {rank} is slow: {takes} {of_ranks}, most of it in"
            f" {max(above, key=above.__getitem__)}"
        )

    def _above(self, rank: int, part: str) -> float:
        """Return the seconds by which a part of a rank's steps is above that of the median rank."""
        seconds = {
            other: median(line.sent[part] for line in each) for other, each in self._lines.items()
        }
        return seconds[rank] - median_low(seconds.values())


def spread_of(seconds: Sequence[float]) -> float:
    """Return the spread of some steps: their standard deviation, as the median
    absolute deviation tells it.
    """
    middle = median(seconds)
    return DEVIATION * median(abs(each - middle) for each in seconds)


def _steps_of(lines: Collection[Line]) -> int:
    return sum(line.steps for line in lines)


def _last(lines: Sequence[Line], steps: int) -> list[Line]:
    """Return the fewest of the last lines that have so many steps."""
    last: list[Line] = []
    missing = steps
    for line in reversed(lines):
        if missing <= 0:
            break
        last.append(line)
        missing -= line.steps
    return last[::-1]


def _is_steady(lines: Sequence[Line]) -> bool:
    """Return whether the steps of a rank take alike, in and between its lines.

    Between them by the differences of neighbors: those of one change, such as that to a
    slow rank, are few.
    """
    inside = median(line.sent.get("spread", 0.0) for line in lines)
    owns = [line.own for line in lines]
    steps_between = [abs(after - before) for before, after in pairwise(owns)]
    between = DEVIATION * median(steps_between) / sqrt(2) if len(lines) >= FEW else 0.0
    return max(inside, between) <= STEADY * median(owns)


def _least_third(lines: Sequence[Line]) -> float:
    """Return the median of the fastest third of a window: what else a machine does slows a rank
    down for a while.
    """
    owns = [line.own for line in lines]
    size = -(-len(owns) // 3)
    return min(median(owns[start : start + size]) for start in range(0, len(owns), size))

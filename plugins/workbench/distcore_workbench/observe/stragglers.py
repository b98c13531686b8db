"""Find ranks that are slower than the others, by their own work: without waits for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import sqrt
from statistics import median, median_low
from typing import NamedTuple

WINDOW, LONG_WINDOW = 30, 150
"""Steps that are compared, at least: of a rank with steady steps, and of one whose steps vary."""
STEADY = 0.07
"""The spread of a rank's steps up to which they are steady, as a fraction of their median."""
ABOVE, NO_LONGER = 0.10, 0.05
"""Fractions by which a rank's own work in a step exceeds the median of all ranks.

Above the first the rank is named, below the second it is slow no longer. Between the two nothing
changes.
"""
LEAST = 0.002
"""Seconds of a step above the median that are worth a line: other programs vary short steps."""
PARTS = ("data", "compute")
"""A rank's own work in a step, which waits for no other rank.

``data`` is waiting for rows and collating them; ``compute`` the forward passes, and all backward
passes but the last.
"""
DEVIATION = 1.4826
"""Standard deviation of a normal distribution whose median absolute deviation is 1."""

FEW = 10
"""Lines from which on the spread of steps is also measured by the differences between lines.

Of fewer lines, only the spread inside each, which the rank sends, counts.
"""

Sent = Mapping[str, float]
"""The values that a rank sends with a log line: medians of the parts, ``spread`` of their sums."""


class Line(NamedTuple):
    """The values that a rank has sent with one log line."""

    steps: int
    """Number of steps."""
    sent: Sent
    """Medians of a step."""
    own: float
    """Seconds of its own part, all parts together."""


class Stragglers:
    """Compares ranks by the median of their steps, which one disturbed step does not move."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[Line]] = {}
        self._named: set[int] = set()

    def add(self, news: Mapping[int, Sent], steps: int) -> list[str]:
        """Add the seconds of a step that ranks sent, and return a line for each slow one.

        The seconds are medians of ``steps`` steps. A rank whose steps vary is watched for longer:
        other programs make them vary, and do so for a while. A rank is named again only after it
        was no slower than the others.
        """
        for rank, sent in news.items():
            lines = self._lines.setdefault(rank, deque())
            own_seconds = sum(sent[part] for part in PARTS)
            lines.append(Line(steps, sent, own_seconds))
            while _steps_of(lines) - lines[0].steps >= LONG_WINDOW:
                lines.popleft()
        if len(self._lines) < 2:
            return []
        steady = {rank for rank, lines in self._lines.items() if _is_steady(lines)}
        varying = self._lines.keys() - steady
        return [*self._judge(WINDOW, steady), *self._judge(LONG_WINDOW, varying)]

    def _judge(self, length: int, ranks: Collection[int]) -> Iterator[str]:
        """Judge ranks by their last ``length`` steps; yield a line for each that became slow."""
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
        """Take the last ``length`` steps, at least, from the ``lines`` of each rank."""
        self._lines: dict[int, list[Line]] = {}
        self._medians: dict[int, float] = {}
        for rank, lines_of_rank in lines.items():
            last_lines = _last(lines_of_rank, length)
            self._lines[rank] = last_lines
            self._medians[rank] = median(line.own for line in last_lines)
        self._length = length
        # Of two ranks the faster is usual.
        self._usual = max(median_low(self._medians.values()), 1e-9)

    def excess(self, rank: int) -> float:
        """Return by how much a rank is slower than the median rank, as a fraction of its time."""
        return self._medians[rank] / self._usual - 1

    def is_slow(self, rank: int) -> bool:
        """Return True if a rank is slower by enough, and was slower in each part of the window."""
        if self.excess(rank) <= max(ABOVE, LEAST / self._usual):
            return False
        return _least_third(self._lines[rank]) > (1 + NO_LONGER) * self._usual

    def line(self, rank: int) -> str:
        """Return the line about a slow rank, with the part of its steps that makes it slow."""
        slowest_part = max(PARTS, key=lambda part: self._above(rank, part))
        milliseconds = self._medians[rank] * 1e3
        return (
            f"rank {rank} is slow: its own part of a step takes {milliseconds:.1f} ms,"
            f" {self.excess(rank):.0%} above the median of {len(self._lines)} ranks over"
            f" {self._length} steps, most of it in {slowest_part}"
        )

    def _above(self, rank: int, part: str) -> float:
        """Return the seconds by which a part of a rank's steps is above that of the median rank."""
        seconds = {}
        for other_rank, lines in self._lines.items():
            seconds[other_rank] = median(line.sent[part] for line in lines)
        return seconds[rank] - median_low(seconds.values())


def spread_of(seconds: Sequence[float]) -> float:
    """Return the standard deviation of steps, estimated by their median absolute deviation."""
    middle = median(seconds)
    return DEVIATION * median(abs(step_seconds - middle) for step_seconds in seconds)


def _steps_of(lines: Collection[Line]) -> int:
    """Return the number of steps in lines."""
    return sum(line.steps for line in lines)


def _last(lines: Sequence[Line], steps: int) -> list[Line]:
    """Return the fewest of the last lines that have ``steps`` steps together."""
    last: list[Line] = []
    missing = steps
    for line in reversed(lines):
        if missing <= 0:
            break
        last.append(line)
        missing -= line.steps
    return last[::-1]


def _is_steady(lines: Sequence[Line]) -> bool:
    """Return True if the steps of a rank take about as long, in and between its lines.

    Between lines it is the difference of neighbors that counts: a single change, such as that to a
    slow rank, makes few of them large.
    """
    spread_inside = median(line.sent.get("spread", 0.0) for line in lines)
    own_seconds = [line.own for line in lines]
    spread_between = 0.0
    if len(lines) >= FEW:
        changes = [abs(after - before) for before, after in pairwise(own_seconds)]
        # The difference of two such values varies by sqrt(2) more than each.
        spread_between = DEVIATION * median(changes) / sqrt(2)
    return max(spread_inside, spread_between) <= STEADY * median(own_seconds)


def _least_third(lines: Sequence[Line]) -> float:
    """Return the median of the fastest third of a window.

    Other programs slow a rank down for a while, but not in all of the window.
    """
    own_seconds = [line.own for line in lines]
    size = -(-len(own_seconds) // 3)
    medians = []
    for start in range(0, len(own_seconds), size):
        third = own_seconds[start : start + size]
        medians.append(median(third))
    return min(medians)

"""Ranks that are slower than the others: by the own part of their steps, in which they wait for no other rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from statistics import median, median_low

WINDOW = 30
"""Steps that are compared, at least."""
ABOVE = 0.10
"""How far above the median of all ranks the own part of a rank's steps is before the rank is named."""
LEAST = 0.002
"""Seconds of a step above the median that are worth a line: what else a machine does makes short steps differ."""
PARTS = ("data", "compute")
"""The own part of a step: waiting for rows and collating them; forward passes, and all backward passes but the last."""


class Stragglers:
    """Compares ranks by the median of their steps, which one step that was disturbed does not move."""

    def __init__(self) -> None:
        self._windows: dict[int, deque[tuple[int, Mapping[str, float]]]] = {}
        self._named: set[int] = set()

    def add(self, news: Mapping[int, Mapping[str, float]], steps: int) -> list[str]:
        """Add the seconds of a step that ranks sent, each the median of so many steps; return a line for each slow one.

        A rank is named again only after it was no slower than the others.
        """
        for rank, sent in news.items():
            window = self._windows.setdefault(rank, deque())
            window.append((steps, sent))
            while sum(one for one, _ in window) - window[0][0] >= WINDOW:
                window.popleft()
        slow = dict(self._slow())
        lines = [line for rank, line in slow.items() if rank not in self._named]
        self._named = set(slow)
        return lines

    def _slow(self) -> Iterator[tuple[int, str]]:
        full = {rank: window for rank, window in self._windows.items() if sum(one for one, _ in window) >= WINDOW}
        own = {
            rank: {part: median(sent[part] for _, sent in window) for part in PARTS} for rank, window in full.items()
        }
        if len(own) < 2 or len(own) < len(self._windows):
            return
        usual = {part: median_low(parts[part] for parts in own.values()) for part in PARTS}  # of two, the faster
        whole = median_low(sum(parts.values()) for parts in own.values())
        for rank, parts in own.items():
            mine = sum(parts.values())
            if mine > whole + max(ABOVE * whole, LEAST) and _least_third(full[rank]) > (1 + ABOVE / 2) * whole:
                part = max(PARTS, key={part: parts[part] - usual[part] for part in PARTS}.__getitem__)
                says = f"its own part of a step takes {mine * 1e3:.1f} ms, {mine / whole - 1:.0%} above the median"
                yield rank, f"rank {rank} is slow: {says} of {len(own)} ranks over {WINDOW} steps, most of it in {part}"


def _least_third(window: Collection[tuple[int, Mapping[str, float]]]) -> float:
    """Return the median of the fastest third of a window: what else a machine does slows a rank down for a while."""
    sums = [sum(sent[part] for part in PARTS) for _, sent in window]
    size = -(-len(sums) // 3)
    return min(median(sums[start : start + size]) for start in range(0, len(sums), size))

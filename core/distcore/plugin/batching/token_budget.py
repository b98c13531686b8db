"""How the rows of a step are cut into micro-batches by their tokens, so that ranks finish early and together.

A micro-batch is padded to its longest row. The more micro-batches rows sorted by length are cut into, the less padding
they need; but each one costs a forward and a backward pass, which take time beside their tokens. The cut weighs one
against the other. It is a function of the lengths alone, in whole numbers, so every rank finds the same.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from sys import maxsize

import numpy as np

SIZELESS = 32
"""Most rows of a micro-batch where all rows of a step have length 1, which says nothing of their size: images."""
EXACT = 512
"""Most rows whose cut for one data shard is the best of all cuts; of more rows, micro-batches of like cost are made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCut:
    """How to cut the rows of a step by their tokens."""

    tokens: int
    """Most padded tokens of a micro-batch. A row that is longer is alone in its own."""
    forward: int
    """What a micro-batch costs beside its tokens, in tokens."""
    rows: int | None = None
    """Most rows of a micro-batch; ``None``: as its tokens say, but ``SIZELESS`` where they say nothing."""
    pads: bool = True
    """Whether rows of a micro-batch are padded to the longest of them; else its cost is its tokens alone."""

    def fit(self, length: int) -> int:
        """Return how many rows of this length a micro-batch may have, at least 1."""
        return max(1, min(self.tokens // max(1, length), self.most(length)))

    def most(self, longest: int) -> int:
        """Return how many rows a micro-batch may have, apart from its tokens, in a step with this longest row."""
        if self.rows is not None:
            return self.rows
        return SIZELESS if longest <= 1 else maxsize

    def deal(self, lengths: np.ndarray, shards: int, turns: int | None = None) -> np.ndarray:
        """Return the micro-batches of each shard, as the first of its rows and the one after its last.

        ``lengths`` are those of the rows, ascending, int64, shape ``(n,)``. The result is int64, ``(turns, shards,
        2)``: ``turns`` micro-batches for each shard, or as many as are best. Some are empty where rows are fewer.
        In each turn the shards take micro-batches of like cost, the cheapest in the first.
        """
        bounds = self._bounds(lengths, shards, turns)
        slices = np.array(list(pairwise(bounds)), dtype=np.int64)
        dealt: np.ndarray = slices[_dealt(_Sorted(self, lengths).costs(bounds), shards)]
        return dealt

    def turns(self, lengths: np.ndarray, shards: int) -> int:
        """Return how many micro-batches each shard should have, for a step of which ``lengths`` are a part.

        A fifth of the tokens is spared, for other parts with longer rows.
        """
        spared = replace(self, tokens=max(1, self.tokens * 4 // 5))
        return (len(spared._bounds(lengths, shards)) - 1) // shards

    def _bounds(self, lengths: np.ndarray, shards: int, turns: int | None = None) -> list[int]:
        """Return where to cut: from 0 to n, with both."""
        longest = int(lengths[-1]) if len(lengths) else 1
        if not len(lengths) or lengths[0] == longest:
            return equal_bounds(len(lengths), (turns or -(-len(lengths) // (self.fit(longest) * shards))) * shards)
        if turns is None and shards == 1 and len(lengths) <= EXACT and self.pads:
            return self._cheapest(lengths)
        rows = _Sorted(self, lengths)
        return rows.even(turns * shards, rows.cost(0, rows.count)) if turns else self._earliest(rows, shards)

    def _cheapest(self, lengths: np.ndarray) -> list[int]:
        """Return the cut of least cost for one shard, by a dynamic programme over where micro-batches end."""
        count, most = len(lengths), self.most(int(lengths[-1]))
        sizes = np.arange(count, 0, -1)
        least, begins = np.zeros(count + 1, dtype=np.int64), [0]
        for stop, length in enumerate(lengths.tolist(), start=1):
            first = max(0, stop - max(1, min(self.tokens // max(1, length), most)))
            costs = least[first:stop] + sizes[count - (stop - first) :] * length
            begin = int(costs.argmin())
            least[stop] = costs[begin] + self.forward
            begins.append(first + begin)
        bounds = [count]
        while bounds[-1]:
            bounds.append(begins[bounds[-1]])
        return bounds[::-1]

    def _earliest(self, rows: _Sorted, shards: int) -> list[int]:
        """Return the cut by which the last of several shards is done first, among cuts into slices of like cost."""
        turns = -(-(len(rows.greedy(self.tokens, rows.count)) - 1) // shards)
        best, least, misses = list[int](), 0, 0
        # No cut is done earlier than one without padding, whose work is spread evenly.
        while not best or (misses < 2 and rows.before[-1] + self.forward * turns * shards < least * shards):
            bounds = rows.even(turns * shards, self.tokens)
            costs = rows.costs(bounds)
            spent = int(costs[_dealt(costs, shards)].sum(axis=0).max()) + self.forward * turns
            misses += 1
            if not best or spent < least:
                best, least, misses = bounds, spent, 0
            if turns * shards >= rows.count:
                break
            turns = max(turns + 1, turns * 6 // 5)
        return best


class _Sorted:
    """Rows in ascending order of length, and what slices of them cost."""

    def __init__(self, cut: TokenCut, lengths: np.ndarray) -> None:
        self.lengths: list[int] = lengths.tolist()
        self.before: list[int] = [0, *accumulate(self.lengths)]
        self.count = len(self.lengths)
        self.most = cut.most(self.lengths[-1]) if self.lengths else 1
        self.pads = cut.pads

    def cost(self, start: int, stop: int) -> int:
        """Return the tokens of the rows from ``start`` to ``stop``, those that pad them included."""
        if not self.pads or start == stop:
            return self.before[stop] - self.before[start]
        return (stop - start) * self.lengths[stop - 1]

    def costs(self, bounds: list[int]) -> np.ndarray:
        """Return the cost of each slice, int64, shape ``(len(bounds) - 1,)``."""
        return np.array([self.cost(start, stop) for start, stop in pairwise(bounds)], dtype=np.int64)

    def greedy(self, bound: int, count: int) -> list[int]:
        """Return the bounds of slices of one row, or that cost ``bound`` at most; no more than ``count`` of them."""
        bounds = [0]
        while bounds[-1] < self.count and len(bounds) <= count:
            start = bounds[-1]
            most = min(self.most, bound // max(1, self.lengths[start]) if self.pads else self.count)
            stops = range(start + 2, min(self.count, start + most) + 1)  # one row may cost what it will
            bounds.append(start + 1 + bisect_right(stops, bound, key=lambda stop: self.cost(start, stop)))
        return bounds

    def even(self, count: int, limit: int) -> list[int]:
        """Return the bounds of ``count`` slices, the costliest of which costs as little as can be, to 1 part in 128.

        There is a cut in which none costs more than ``limit``, but for single rows. Slices at the end are empty if rows
        are fewer.
        """
        low, high = min(-(-self.before[-1] // count), limit), limit
        while low < high - low // 128:
            middle = (low + high) // 2
            if self.greedy(middle, count)[-1] == self.count:
                high = middle
            else:
                low = middle + 1
        bounds = self.greedy(high, count)
        while len(bounds) <= min(count, self.count):  # costs come in jumps, so there may be fewer: halve the costliest
            sizes = [self.cost(start, stop) if stop - start > 1 else 0 for start, stop in pairwise(bounds)]
            place = sizes.index(max(sizes))
            bounds.insert(place + 1, (bounds[place] + bounds[place + 1]) // 2)
        return bounds + [self.count] * (count + 1 - len(bounds))


def equal_bounds(rows: int, count: int) -> list[int]:
    """Return where to cut so many rows into ``count`` slices of equally many: from 0 to ``rows``, with both."""
    return [position * rows // count for position in range(count + 1)]


def _dealt(costs: np.ndarray, shards: int) -> np.ndarray:
    """Return which slices each shard takes, int64, shape ``(turns, shards)``; every other turn is reversed."""
    order = np.argsort(costs, kind="stable").reshape(-1, shards)
    order[1::2] = order[1::2, ::-1].copy()
    return order

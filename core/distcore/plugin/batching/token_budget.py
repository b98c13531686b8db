"""Cut the rows of a step into micro-batches by their tokens: ranks finish early and together.

A micro-batch is padded to its longest row. Rows are sorted by length, so more micro-batches need
less padding. But each micro-batch adds a forward and a backward pass, which have a fixed cost. The
cut balances padding against this cost. It depends on the lengths alone and computes with integers,
so every rank finds the same cut.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from sys import maxsize

import numpy as np

from distcore.rounding import ceil_div

SIZELESS = 32
"""Largest number of rows in a micro-batch of rows of length 1, such as images.

Their size is unknown.
"""
EXACT = 512
"""Largest number of rows for the exact cut of one data shard.

More rows are cut into micro-batches of equal cost.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCut:
    """How to cut the rows of a step by their tokens."""

    tokens: int
    """Largest number of padded tokens in a micro-batch; a longer row is alone in one."""
    forward: int
    """Fixed cost of a micro-batch, in tokens."""
    rows: int | None = None
    """Largest number of rows in a micro-batch.

    ``None``: tokens bound it, or ``SIZELESS`` if all lengths are 1.
    """
    pads: bool = True
    """True if rows are padded to the longest of their micro-batch.

    Otherwise a micro-batch costs its own tokens.
    """

    def fit(self, length: int) -> int:
        """Return the largest number of rows of this length in a micro-batch, at least 1."""
        rows_by_tokens = self.tokens // max(1, length)
        return max(1, min(rows_by_tokens, self.most(length)))

    def most(self, longest: int) -> int:
        """Return the bound on rows, not tokens, of a micro-batch; ``longest`` is of the step."""
        if self.rows is not None:
            return self.rows
        return SIZELESS if longest <= 1 else maxsize

    def assign(self, lengths: np.ndarray, shards: int, rounds: int | None = None) -> np.ndarray:
        """Assign micro-batches to shards; return first row and end of each.

        The result is int64, ``(rounds, shards, 2)``.

        ``lengths`` are the rows' lengths in ascending order, int64, shape ``(n,)``. Without
        ``rounds`` their number is the cheapest. Some micro-batches are empty if there are too few
        rows. The micro-batches of one round have similar costs; the first round is the cheapest.
        """
        bounds = self._bounds(lengths, shards, rounds)
        slices = np.array(list(pairwise(bounds)), dtype=np.int64)
        costs = _Sorted(self, lengths).costs(bounds)
        assigned: np.ndarray = slices[_assignment(costs, shards)]
        return assigned

    def block_bounds(self, lengths: np.ndarray, count: int) -> list[int]:
        """Return the bounds of ``count`` micro-batches of like cost, or of more, as few as may be.

        More are needed where one would have too many tokens or rows. ``lengths`` are the rows'
        lengths in ascending order, at least one.
        """
        longest = int(lengths[-1])
        if lengths[0] == longest:
            fewest = -(-len(lengths) // self.fit(longest))
            return equal_bounds(len(lengths), max(count, fewest))
        rows = _Sorted(self, lengths)
        fewest = len(rows.greedy(self.tokens, rows.count)) - 1
        limit = min(self.tokens, rows.cost(0, rows.count))
        return rows.balanced_bounds(max(count, fewest), limit)

    def rounds(self, lengths: np.ndarray, shards: int) -> int:
        """Return the number of micro-batches per shard, from ``lengths`` of a part of the rows.

        The other parts may have longer rows, so a fifth of the tokens is reserved for them.
        """
        reduced = replace(self, tokens=max(1, self.tokens * 4 // 5))
        micro_batches = len(reduced._bounds(lengths, shards)) - 1
        return micro_batches // shards

    def _bounds(self, lengths: np.ndarray, shards: int, rounds: int | None = None) -> list[int]:
        """Return the bounds of all micro-batches of a step, from 0 to the number of rows."""
        longest = int(lengths[-1]) if len(lengths) else 1
        if not len(lengths) or lengths[0] == longest:
            if not rounds:
                rounds = ceil_div(len(lengths), self.fit(longest) * shards)
            return equal_bounds(len(lengths), rounds * shards)
        if rounds is None and shards == 1 and len(lengths) <= EXACT and self.pads:
            return self._cheapest(lengths)
        rows = _Sorted(self, lengths)
        if rounds:
            return rows.balanced_bounds(rounds * shards, rows.cost(0, rows.count))
        return self._earliest(rows, shards)

    def _cheapest(self, lengths: np.ndarray) -> list[int]:
        """Return the cheapest cut for one shard, by dynamic programming over ends of micro-batches.

        ``least[i]`` is the cost of the best cut of the first ``i`` rows, ``begins[i]`` the start of
        its last slice.
        """
        count = len(lengths)
        max_rows = self.most(int(lengths[-1]))
        sizes = np.arange(count, 0, -1)
        least = np.zeros(count + 1, dtype=np.int64)
        begins = [0]
        for stop, length in enumerate(lengths.tolist(), start=1):
            # Rows ascend, so the last row of a slice is its longest: it sets the padded length of
            # all rows in it.
            rows = max(1, min(self.tokens // max(1, length), max_rows))
            first = max(0, stop - rows)
            costs = least[first:stop] + sizes[count - (stop - first) :] * length
            begin = int(costs.argmin())
            least[stop] = costs[begin] + self.forward
            begins.append(first + begin)
        bounds = [count]
        while bounds[-1]:
            bounds.append(begins[bounds[-1]])
        return bounds[::-1]

    def _earliest(self, rows: _Sorted, shards: int) -> list[int]:
        """Return the cut with which the last of several shards ends first, by trial of rounds."""
        fewest_slices = len(rows.greedy(self.tokens, rows.count)) - 1
        rounds = ceil_div(fewest_slices, shards)
        best: list[int] = []
        least = 0
        misses = 0
        while True:
            # The bound of the search: with so many rounds, no cut ends before one without padding
            # that is spread evenly. Two cuts in a row without an improvement end the search, too.
            fixed_cost = self.forward * rounds
            lower_bound = rows.before[-1] + fixed_cost * shards
            if best and (misses >= 2 or lower_bound >= least * shards):
                return best
            bounds = rows.balanced_bounds(rounds * shards, self.tokens)
            costs = rows.costs(bounds)
            cost_of_shards = costs[_assignment(costs, shards)].sum(axis=0)
            spent = int(cost_of_shards.max()) + fixed_cost
            misses += 1
            if not best or spent < least:
                best, least, misses = bounds, spent, 0
            if rounds * shards >= rows.count:
                return best
            rounds = max(rounds + 1, rounds * 6 // 5)


class _Sorted:
    """Rows in ascending order of length, and the costs of their slices."""

    def __init__(self, cut: TokenCut, lengths: np.ndarray) -> None:
        self.lengths: list[int] = lengths.tolist()
        self.before: list[int] = [0, *accumulate(self.lengths)]
        self.count = len(self.lengths)
        self.most = cut.most(self.lengths[-1]) if self.lengths else 1
        self.pads = cut.pads

    def cost(self, start: int, stop: int) -> int:
        """Return the tokens of the rows from ``start`` to ``stop``, padding included."""
        if not self.pads or start == stop:
            return self.before[stop] - self.before[start]
        return (stop - start) * self.lengths[stop - 1]

    def costs(self, bounds: list[int]) -> np.ndarray:
        """Return the cost of each slice, int64, shape ``(len(bounds) - 1,)``."""
        costs = [self.cost(start, stop) for start, stop in pairwise(bounds)]
        return np.array(costs, dtype=np.int64)

    def greedy(self, bound: int, count: int) -> list[int]:
        """Return the bounds of at most ``count`` slices, each as long as ``bound`` allows.

        Each has at least one row.
        """
        bounds = [0]
        while bounds[-1] < self.count and len(bounds) <= count:
            start = bounds[-1]
            max_rows = self.most
            if self.pads:
                max_rows = min(max_rows, bound // max(1, self.lengths[start]))
            end = min(self.count, start + max_rows)
            # From the second row on: a single row may exceed the bound.
            stops = range(start + 2, end + 1)
            within = bisect_right(stops, bound, key=lambda stop: self.cost(start, stop))
            bounds.append(start + 1 + within)
        return bounds

    def balanced_bounds(self, count: int, limit: int) -> list[int]:
        """Return the bounds of ``count`` slices that minimize the largest cost, to 1 part in 128.

        The caller ensures that a cut exists in which only single rows cost more than ``limit``. The
        last slices are empty if there are too few rows.
        """
        # Bisection over the largest cost: a bound is feasible if greedy slices within it reach
        # the last row.
        low = min(ceil_div(self.before[-1], count), limit)
        high = limit
        while low < high - low // 128:
            middle = (low + high) // 2
            if self.greedy(middle, count)[-1] == self.count:
                high = middle
            else:
                low = middle + 1
        bounds = self.greedy(high, count)
        # Greedy may need fewer slices: halve the costliest.
        while len(bounds) <= min(count, self.count):
            costs = []
            for start, stop in pairwise(bounds):
                # A single row cannot be halved.
                costs.append(self.cost(start, stop) if stop - start > 1 else 0)
            costliest = costs.index(max(costs))
            middle = (bounds[costliest] + bounds[costliest + 1]) // 2
            bounds.insert(costliest + 1, middle)
        return bounds + [self.count] * (count + 1 - len(bounds))


def equal_bounds(rows: int, count: int) -> list[int]:
    """Return the bounds of ``count`` slices with equal numbers of rows, from 0 to ``rows``."""
    return [position * rows // count for position in range(count + 1)]


def _assignment(costs: np.ndarray, shards: int) -> np.ndarray:
    """Return the slice of each round and shard, int64 ``(rounds, shards)``; the cheapest first."""
    order = np.argsort(costs, kind="stable").reshape(-1, shards)
    # A round has slices of neighboring costs. Every other round is reversed, or the last shard
    # would always get the dearest one.
    order[1::2] = order[1::2, ::-1].copy()
    return order

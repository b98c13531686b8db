"""Rows of several sources, mixed by weights.

The source of each position follows a fixed pattern of ``PERIOD`` positions, in which each source has its exact share
and comes up as evenly as possible. So any number of rows from the start is within one row of the weights, and which row
of which source a position has is computed, not stored. Each source goes through its own epochs, in its own order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from distcore_data.orders.windows import WindowedRows

PERIOD = 2**16
"""Positions after which the pattern of sources repeats: weights count to 1 part of this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedRows:
    """Rows of several sources, mixed by weights; implements ``RowOrder``.

    An epoch has as many positions as all sources together have rows. The sources go on where the epoch before left
    them, so a source with a large weight comes up several times in an epoch, and another not as a whole.
    """

    sources: tuple[WindowedRows, ...]
    """The sources, each with the numbers of its own rows."""
    shares: tuple[int, ...]
    """Positions of each source in a period, of ``shares_of``."""

    def __len__(self) -> int:
        """Return the number of positions of an epoch."""
        return sum(map(len, self.sources))

    @property
    def content(self) -> str:
        """SHA-256 over shares and sources, in hexadecimal."""
        parts = [str(self.shares), *(source.content for source in self.sources)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def __call__(self, seed: int, epoch: int) -> MixedEpoch:
        """Return the order of ``epoch``, counted from 0."""
        return MixedEpoch(self, seed, epoch)


@dataclass(frozen=True, eq=False)
class MixedEpoch:
    """One epoch of ``MixedRows``; implements ``distcore.Column``."""

    order: MixedRows
    """The sources."""
    seed: int
    """Seed of the run."""
    epoch: int
    """Number of the epoch of the mixture."""

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.order)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows at ``positions``, both int64, shape ``(n,)``."""
        sources, numbers = self.draws(positions)
        rows = np.empty(len(positions), np.int64)
        for source in np.unique(sources).tolist():
            order, mine = self.order.sources[source], sources == source
            epochs, places = np.divmod(numbers[mine], len(order))
            drawn = np.empty(len(places), np.int64)
            for epoch in np.unique(epochs).tolist():
                drawn[epochs == epoch] = order(self.seed, epoch)[places[epochs == epoch]]
            rows[mine] = drawn
        return rows

    def draws(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source at each position, and how many of its rows came before, since the run began; int64."""
        pattern, before = _pattern(self.order.shares)
        periods, places = np.divmod(positions + self.epoch * len(self), PERIOD)
        sources = pattern[places]
        return sources, periods * np.asarray(self.order.shares)[sources] + before[places]


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of each source in a period, in proportion to its weight, and at least 1 each.

    ``weights`` are positive. What is left by rounding down goes to the sources that lost most by it.
    """
    wanted = np.asarray(weights, np.float64) / sum(weights) * PERIOD
    shares = np.maximum(np.floor(wanted).astype(np.int64), 1)
    left = PERIOD - int(shares.sum())
    shares[np.argsort(shares - wanted, kind="stable")[: max(0, left)]] += 1
    shares[shares.argmax()] += min(0, left)  # less than nothing is left if tiny weights were raised to 1
    return tuple(shares.tolist())


@lru_cache(maxsize=4)
def _pattern(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each position in a period, and how many of its positions came before; int64."""
    sources = np.repeat(np.arange(len(shares)), shares)
    numbers = np.concatenate([np.arange(share) for share in shares])
    due = (2 * numbers + 1) / np.asarray(shares)[sources]  # a division rounds equal fractions to equal floats
    order = np.lexsort((sources, due))
    return sources[order], numbers[order]

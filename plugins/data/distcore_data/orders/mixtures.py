"""Rows of several sources, mixed by weights, which may change during a run.

The source of each position follows a fixed pattern of ``PERIOD`` positions, in which each source
has its exact share and comes up as evenly as possible. So any number of rows from the start is
within one row of the weights, and which row of which source a position has is computed, not stored.
Each source goes through its own epochs, in its own order. Where weights change, a pattern of the
new ones begins, and each source goes on with its next row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from distcore_data.orders.windows import WindowedRows

PERIOD = 2**16
"""Positions after which the pattern of sources repeats: weights count to 1 part of this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedRows:
    """Rows of several sources, mixed by weights; implements ``RowOrder``.

    An epoch has as many positions as all sources together have rows. The sources go on where the
    epoch before left them, so a source with a large weight comes up several times in an epoch, and
    another not as a whole.
    """

    sources: tuple[WindowedRows, ...]
    """The sources, each with the numbers of its own rows."""
    shares: tuple[int, ...]
    """Positions of each source in a period, of ``shares_of``."""
    later: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Other shares, each after the first position where they hold, which counts
    on over epochs; ascending.
    """

    def __len__(self) -> int:
        """Return the number of positions of an epoch."""
        return sum(map(len, self.sources))

    @property
    def content(self) -> str:
        """SHA-256 over shares and sources, in hexadecimal."""
        shares = str(self.shares) + (str(self.later) if self.later else "")
        parts = [shares, *(source.content for source in self.sources)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def __call__(self, seed: int, epoch: int) -> MixedEpoch:
        """Return the order of ``epoch``, counted from 0."""
        return MixedEpoch(self, seed, epoch)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, of one pattern each."""
        stages = [Stage(0, self.shares, np.zeros(len(self.sources), np.int64))]
        for start, shares in self.later:
            stages.append(
                Stage(
                    start, shares, stages[-1].before + stages[-1].counts(start - stages[-1].start)
                )
            )
        return tuple(stages)


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """Positions with one pattern, up to where the next stage begins."""

    start: int
    """The first position."""
    shares: tuple[int, ...]
    """Positions of each source in a period."""
    before: np.ndarray
    """Rows of each source at the positions before, int64, shape ``(sources,)``."""

    def counts(self, positions: int) -> np.ndarray:
        """Return the rows of each source at so many positions from the
        start, int64, shape ``(sources,)``.
        """
        periods, rest = divmod(positions, PERIOD)
        counts: np.ndarray = np.asarray(self.shares, np.int64) * periods
        return counts + np.bincount(_pattern(self.shares)[0][:rest], minlength=len(counts))

    def draws(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source at each position, and how many of its rows came before, both int64."""
        pattern, inside = _pattern(self.shares)
        periods, places = np.divmod(positions - self.start, PERIOD)
        sources = pattern[places]
        return (
            sources,
            self.before[sources] + periods * np.asarray(self.shares)[sources] + inside[places],
        )


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
        """Return the source at each position, and how many of its rows came before, since
        the run began; int64.
        """
        everywhere, stages = positions + self.epoch * len(self), self.order.stages
        at = np.searchsorted([stage.start for stage in stages], everywhere, "right") - 1
        sources, numbers = np.empty((2, len(positions)), np.int64)
        for stage in np.unique(at).tolist():
            mine = at == stage
            sources[mine], numbers[mine] = stages[stage].draws(everywhere[mine])
        return sources, numbers


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of each source in a period, in proportion to its weight: at least 1,
    but none for 0.

    A weight is positive or 0, and one is positive. What is left by rounding down goes to those that
    lost most by it.
    """
    wanted = np.asarray(weights, np.float64) / sum(weights) * PERIOD
    shares = np.maximum(np.floor(wanted).astype(np.int64), np.asarray(weights) > 0)
    left = PERIOD - int(shares.sum())
    shares[np.argsort(shares - wanted, kind="stable")[: max(0, left)]] += 1
    # less than nothing is left if tiny weights were raised to 1
    shares[shares.argmax()] += min(0, left)
    return tuple(shares.tolist())


@lru_cache(maxsize=16)
def _pattern(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each position in a period, and how many of its
    positions came before; int64.
    """
    sources = np.repeat(np.arange(len(shares)), shares)
    numbers = np.concatenate([np.arange(share) for share in shares])
    # a division rounds equal fractions to equal floats
    due = (2 * numbers + 1) / np.asarray(shares)[sources]
    order = np.lexsort((sources, due))
    return sources[order], numbers[order]

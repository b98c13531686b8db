"""Shards in random order, and rows shuffled in windows of some shards.

Positions that are near each other then have rows of few shards, so that what is read stays in memory until it is used.
Nothing but the shards' bounds is stored: the order is computed from seed and epoch, window by window.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from distcore import Feistel

SHARDS, ROWS = 0, 1
"""Random streams of an epoch: the order of its shards, and that of the rows in each window."""
STORED = 2**16
"""Most rows of a window whose order is drawn and kept; that of more rows is a Feistel permutation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowedRows:
    """Rows that are shuffled in windows of shards; implements ``RowOrder``. An epoch has each of them once.

    With one shard all rows are shuffled.
    """

    bounds: np.ndarray
    """First row of each shard, and the end of the last one, int64, ascending, shape ``(shards + 1,)``."""
    window: int
    """Shards in a window; at least 1."""
    key: int = 0
    """Number of the source, so that two sources of one size have different orders."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.bounds[-1] - self.bounds[0])

    @property
    def content(self) -> str:
        """SHA-256 over shards, window and key, in hexadecimal."""
        digest = hashlib.sha256(f"windows {self.window} {self.key} ".encode())
        digest.update(np.ascontiguousarray(self.bounds, "<i8").data)
        return digest.hexdigest()

    def __call__(self, seed: int, epoch: int) -> WindowedEpoch:
        """Return the order of ``epoch``, counted from 0."""
        return _epoch(self, seed, epoch)


@dataclass(frozen=True, eq=False)
class WindowedEpoch:
    """One epoch of ``WindowedRows``; implements ``distcore.Column``."""

    order: WindowedRows
    """The rows."""
    seed: int
    """Seed of the run."""
    epoch: int
    """Number of the epoch."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.order)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows at ``positions``, both int64, shape ``(n,)``."""
        windows = np.searchsorted(self._begins, positions, "right") - 1
        rows = np.empty(len(positions), np.int64)
        for window in np.unique(windows).tolist():
            here = windows == window
            rows[here] = self._rows(window, positions[here] - self._begins[window])
        return rows

    def _rows(self, window: int, places: np.ndarray) -> np.ndarray:
        """Return the rows at ``places`` of a window, int64, shape ``(n,)``."""
        shards = self._shards[window * self.order.window :][: self.order.window]
        counts = self.order.bounds[shards + 1] - self.order.bounds[shards]
        ends = np.cumsum(counts)
        drawn = self._drawn(window, int(ends[-1]), places)
        at = np.searchsorted(ends, drawn, "right")
        rows: np.ndarray = self.order.bounds[shards[at]] + drawn - (ends - counts)[at]
        return rows

    def _drawn(self, window: int, rows: int, places: np.ndarray) -> np.ndarray:
        """Return the numbers at ``places`` of a permutation of ``range(rows)``, int64, shape ``(n,)``."""
        seeds = [self.seed, self.epoch, self.order.key, ROWS, window]
        if rows <= STORED:
            stored: np.ndarray = _permutation(rows, *seeds)[places]
            return stored
        low, key = int(places.min()), int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0])
        computed: np.ndarray = Feistel(rows, key, self.epoch).rows_at(low, int(places.max()) + 1)[places - low]
        return computed

    @cached_property
    def _shards(self) -> np.ndarray:
        """The shards in the order of this epoch, int64, shape ``(shards,)``."""
        return _permutation(len(self.order.bounds) - 1, self.seed, self.epoch, self.order.key, SHARDS)

    @cached_property
    def _begins(self) -> np.ndarray:
        """The first position of each window, int64, shape ``(windows,)``."""
        ends = np.cumsum(np.diff(self.order.bounds)[self._shards])
        return np.concatenate([[0], ends[self.order.window - 1 : -1 : self.order.window]])


@lru_cache(maxsize=64)  # the sources of a mixture, in two epochs each
def _epoch(order: WindowedRows, seed: int, epoch: int) -> WindowedEpoch:
    return WindowedEpoch(order, seed, epoch)


@lru_cache(maxsize=64)
def _permutation(rows: int, *seeds: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds))).permutation(rows)

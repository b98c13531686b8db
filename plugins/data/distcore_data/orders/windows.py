"""Shards in random order, and rows shuffled in windows of some shards.

Positions that are near each other then have rows of few shards, so that what is read stays in
memory until it is used.
Nothing but the bounds of shards of different sizes is stored: the order is computed from seed
and epoch, window by window.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from distcore import Column
from distcore.plugin.batching import Feistel

SHARDS, ROWS = 0, 1
"""Random streams of an epoch: the order of its shards, and that of the rows in each window."""
STORED = 2**16
"""Most shards, or rows of a window, whose order is drawn and kept; that of more
is a Feistel permutation.
"""


@dataclass(frozen=True, slots=True)
class EvenBounds:
    """Computed bounds of equal shards, the last of which may be shorter; implements ``Column``."""

    start: int
    """The first row."""
    stop: int
    """The end of the last one."""
    size: int
    """Rows of a shard."""

    def __len__(self) -> int:
        """Return one more than the number of shards."""
        return -(-(self.stop - self.start) // self.size) + 1

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """Return the bounds ``numbers``, from 0, int64 ``(n,)``."""
        bounds: np.ndarray = np.minimum(self.start + numbers * self.size, self.stop)
        return bounds


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowedRows:
    """Rows that are shuffled in windows of shards; implements ``RowOrder``. An epoch has
    each of them once.

    With one shard all rows are shuffled.
    """

    bounds: Column
    """First row of each shard, and the end of the last one, int64, ascending,
    shape ``(shards + 1,)``.
    """
    window: int
    """Shards in a window; at least 1."""
    key: int = 0
    """Number of the source, so that two sources of one size have different orders."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.stop - self.start

    @property
    def start(self) -> int:
        """The first row."""
        return int(self.bounds[np.zeros(1, np.int64)][0])

    @property
    def stop(self) -> int:
        """The end of the last shard."""
        return int(self.bounds[np.array([self.shards])][0])

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.bounds) - 1

    @classmethod
    def even(cls, start: int, stop: int, size: int, window: int, key: int = 0) -> WindowedRows:
        """Return the order of the rows from ``start`` to ``stop`` in shards of ``size`` rows."""
        return cls(bounds=EvenBounds(start, stop, size), window=window, key=key)

    @property
    def content(self) -> str:
        """SHA-256 over shards, window and key, in hexadecimal."""
        computed = "computed " if self.shards > STORED else ""
        digest = hashlib.sha256(f"windows {computed}{self.window} {self.key} ".encode())
        for first in range(0, len(self.bounds), STORED):
            numbers = np.arange(first, min(first + STORED, len(self.bounds)))
            digest.update(np.ascontiguousarray(self.bounds[numbers], "<i8").data)
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
        shards = self._shards(window, window + 1)
        counts = self.order.bounds[shards + 1] - self.order.bounds[shards]
        ends = np.cumsum(counts)
        drawn = self._drawn(window, int(ends[-1]), places)
        at = np.searchsorted(ends, drawn, "right")
        rows: np.ndarray = self.order.bounds[shards[at]] + drawn - (ends - counts)[at]
        return rows

    def _drawn(self, window: int, rows: int, places: np.ndarray) -> np.ndarray:
        """Return the numbers at ``places`` of a permutation of
        ``range(rows)``, int64, shape ``(n,)``.
        """
        seeds = [self.seed, self.epoch, self.order.key, ROWS, window]
        if rows <= STORED:
            stored: np.ndarray = _permutation(rows, *seeds)[places]
            return stored
        low = int(places.min())
        computed: np.ndarray = Feistel(rows, _key(*seeds), self.epoch).rows_at(
            low, int(places.max()) + 1
        )[places - low]
        return computed

    def _shards(self, start: int, stop: int) -> np.ndarray:
        """Return the shards of the windows ``start`` to ``stop``, in the order of
        this epoch, int64, ``(shards,)``.
        """
        shards, seeds = self.order.shards, [self.seed, self.epoch, self.order.key, SHARDS]
        first, last = start * self.order.window, min(stop * self.order.window, shards)
        if shards <= STORED:
            return _permutation(shards, *seeds)[first:last]
        return self._feistel.rows_at(first, last)

    @cached_property
    def _feistel(self) -> Feistel:
        """The order of very many shards."""
        return Feistel(
            self.order.shards, _key(self.seed, self.epoch, self.order.key, SHARDS), self.epoch
        )

    @cached_property
    def _begins(self) -> np.ndarray:
        """The first position of each window, int64, shape ``(windows,)``; few shards at a
        time are in memory.
        """
        windows, some, size = (
            -(-self.order.shards // self.order.window),
            [np.zeros(1, np.int64)],
            self.order.window,
        )
        for first in range(0, windows, step := max(1, STORED // size)):
            shards = self._shards(first, min(first + step, windows))
            counts = self.order.bounds[shards + 1] - self.order.bounds[shards]
            some.append(np.add.reduceat(counts, np.arange(0, len(counts), size)))
        return np.cumsum(np.concatenate(some))[:-1]


@lru_cache(maxsize=64)  # the sources of a mixture, in two epochs each
def _epoch(order: WindowedRows, seed: int, epoch: int) -> WindowedEpoch:
    return WindowedEpoch(order, seed, epoch)


def _key(*seeds: int) -> int:
    return int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0])


@lru_cache(maxsize=64)
def _permutation(rows: int, *seeds: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds))).permutation(rows)

"""The shuffled order of an epoch: drawn and stored, or, for very many rows, computed."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np

from distcore.rounding import ceil_div

STORED_ROWS = 2**22
"""Largest number of rows whose order is drawn and stored, in 8 bytes per row.

The order of more rows is a Feistel permutation.
"""
ROUNDS = 6
"""Rounds of the Feistel network.

Four make it pseudorandom, two more make up for a round function that is only fast.
"""
BLOCK = 2**16
"""Positions that are computed at once, so that the arrays stay in the processor's cache."""


def order_kind(rows: int) -> Literal["permutation", "feistel"]:
    """Return the kind of order of ``rows`` rows; checkpoints name it, since the two differ."""
    return "permutation" if rows <= STORED_ROWS else "feistel"


class Feistel:
    """A pseudorandom permutation of ``range(rows)`` that needs no memory, keyed by seed and epoch.

    A position is split into two digits, in bases near the square root of ``rows``. Each round adds
    a hash of one digit to the other, modulo its base. This permutes slightly more numbers than
    ``rows``. A result outside of the range is permuted again until it is inside ("cycle walking"),
    which gives a permutation of the range. After J. Black and P. Rogaway, Ciphers with Arbitrary
    Finite Domains, CT-RSA 2002. It is no encryption.
    """

    def __init__(self, rows: int, seed: int, epoch: int) -> None:
        """``rows`` is at least 1; ``seed`` and ``epoch`` are not negative."""
        self.rows = rows
        self._base = math.isqrt(rows - 1) + 1
        high_base = ceil_div(rows, self._base)
        self._bases = np.array([self._base, high_base], dtype=np.uint64)
        self._keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS)

    def rows_at(self, start: int, stop: int) -> np.ndarray:
        """Return the rows at positions ``start`` to ``stop`` of the order.

        Shape ``(stop - start,)``, int64.
        """
        blocks = [np.empty(0, np.int64)]
        for first in range(start, stop, BLOCK):
            blocks.append(self._walk(first, min(first + BLOCK, stop)))
        return blocks[1] if len(blocks) == 2 else np.concatenate(blocks)

    def _walk(self, start: int, stop: int) -> np.ndarray:
        """Return the rows of some positions: permute again what lies outside of the range."""
        rows = self._permute(np.arange(start, stop, dtype=np.uint64))
        outside = np.flatnonzero(rows >= self.rows)
        while len(outside):
            rows[outside] = self._permute(rows[outside])
            outside = outside[rows[outside] >= self.rows]
        return rows.astype(np.int64)

    def _permute(self, numbers: np.ndarray) -> np.ndarray:
        """Return the permutation of numbers, uint64, of slightly more numbers than rows."""
        high, low = np.divmod(numbers, self._bases[0])
        digits = [low, high]
        for number, key in enumerate(self._keys):
            base = self._bases[number % 2]
            changed, other = digits[number % 2], digits[1 - number % 2]
            hashed = _mix(other.astype(np.uint32) ^ key).astype(np.uint64)
            # 32 random bits, scaled to a number below the base.
            changed += (hashed * base) >> np.uint64(32)
            # Modulo the base: of a number below it the difference wraps round.
            np.minimum(changed, changed - base, out=changed)
        high *= self._bases[0]
        high += low
        return high


@lru_cache(maxsize=1)  # the loop counts the items of the rows that the sampler has just taken
def computed_rows(rows: int, seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
    """Return ``Feistel(rows, seed, epoch).rows_at(start, stop)``.

    It must not be changed: it may be cached.
    """
    return Feistel(rows, seed, epoch).rows_at(start, stop)


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Scramble 32-bit numbers in place.

    By the finalizer of MurmurHash3, in which every bit changes half of the others.
    """
    numbers ^= numbers >> np.uint32(16)
    numbers *= np.uint32(0x85EBCA6B)
    numbers ^= numbers >> np.uint32(13)
    numbers *= np.uint32(0xC2B2AE35)
    numbers ^= numbers >> np.uint32(16)
    return numbers

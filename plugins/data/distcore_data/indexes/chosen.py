"""Some rows of many, by their numbers: a bit for each row, so that 1e8 rows take 12 MiB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np

BLOCK = 512
"""Bytes, of eight rows each, whose rows are counted."""
AT_ONCE = 2**16
"""Rows that are looked at in one go."""
SPARSE = 64
"""Rows per chosen one above which those between are not looked at."""
ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)


class ChosenRows:
    """Numbers of rows, ascending, without memory for each."""

    def __init__(self, bits: np.ndarray) -> None:
        """``bits``: that of a chosen row is 1, the first one of a byte is its highest; uint8."""
        self.bits = bits
        counts = [np.zeros(1, np.int64)]
        for start in range(0, len(bits), AT_ONCE * BLOCK // 8):
            ones = ONES[bits[start : start + AT_ONCE * BLOCK // 8]]
            counts.append(np.add.reduceat(ones, np.arange(0, len(ones), BLOCK), dtype=np.int64))
        self._ends = np.cumsum(np.concatenate(counts))

    @classmethod
    def from_numbers(cls, rows: int, numbers: Iterable[int] | np.ndarray) -> ChosenRows:
        """Return the rows ``numbers``, ascending, of so many."""
        return cls.from_blocks(rows, _blocks(numbers))

    @classmethod
    def from_blocks(cls, rows: int, blocks: Iterable[np.ndarray]) -> ChosenRows:
        """Return the rows whose numbers are in ``blocks``, one after the other ascending
        int64, of so many.
        """
        bits = np.zeros(-(-rows // 8), np.uint8)
        for block in filter(len, chain.from_iterable(map(_blocks, blocks))):
            first, span = int(block[0]) // 8, int(block[-1]) - int(block[0])
            if span > SPARSE * len(block):
                np.bitwise_or.at(bits, block // 8, (128 >> block % 8).astype(np.uint8))
                continue
            chosen = np.zeros(int(block[-1]) + 1 - first * 8, bool)
            chosen[block - first * 8] = True
            packed = np.packbits(chosen)
            bits[first : first + len(packed)] |= packed
        return cls(bits)

    def __len__(self) -> int:
        """Return how many rows are chosen."""
        return int(self._ends[-1])

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at ``places``, from 0, both int64 ``(n,)``."""
        blocks = np.searchsorted(self._ends, places, "right") - 1
        first, last = (int(blocks.min()), int(blocks.max())) if len(places) else (0, 0)
        if (last - first) * BLOCK <= 2 * len(places):  # most bits between are looked at
            inside = np.flatnonzero(np.unpackbits(self.bits[first * BLOCK : (last + 1) * BLOCK]))
            near: np.ndarray = first * BLOCK * 8 + inside[places - self._ends[first]]
            return near
        numbers = np.empty(len(places), np.int64)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            inside = np.flatnonzero(np.unpackbits(self.bits[block * BLOCK : (block + 1) * BLOCK]))
            numbers[here] = block * BLOCK * 8 + inside[places[here] - self._ends[block]]
        return numbers

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all numbers, int64, some of them in memory at a time."""
        for start in range(0, len(self.bits), AT_ONCE // 8):
            yield np.flatnonzero(np.unpackbits(self.bits[start : start + AT_ONCE // 8])) + start * 8

    def before(self, number: int) -> int:
        """Return how many of the rows below ``number`` are chosen."""
        block, rest = divmod(number, BLOCK * 8)
        bits = np.unpackbits(self.bits[block * BLOCK : (block + 1) * BLOCK])
        return int(self._ends[block] + bits[:rest].sum(dtype=np.int64))


def _blocks(numbers: Iterable[int] | np.ndarray) -> Iterator[np.ndarray]:
    if isinstance(numbers, np.ndarray):
        yield from (numbers[start : start + AT_ONCE] for start in range(0, len(numbers), AT_ONCE))
        return
    left = iter(numbers)
    while some := [*islice(left, AT_ONCE)]:
        yield np.array(some, np.int64)

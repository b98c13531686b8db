"""Some rows of many, by their numbers: a bit for each row, so that 1e8 rows take 12 MiB."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

BLOCK = 512
"""Bytes, of eight rows each, whose rows are counted."""
ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)


class ChosenRows:
    """Numbers of rows, ascending, without memory for each."""

    def __init__(self, bits: np.ndarray) -> None:
        """``bits``: that of a chosen row is 1, the first one of a byte is its highest; uint8."""
        self.bits = bits
        padded = np.zeros(-(-len(bits) // BLOCK) * BLOCK, np.uint8)
        padded[: len(bits)] = ONES[bits]
        self._ends = np.cumsum([0, *padded.reshape(-1, BLOCK).sum(1, dtype=np.int64)])

    @classmethod
    def of(cls, rows: int, numbers: Iterable[int] | np.ndarray) -> ChosenRows:
        """Return the rows ``numbers`` of so many."""
        chosen = np.zeros(rows, bool)
        if isinstance(numbers, np.ndarray):
            chosen[numbers] = True
        else:
            for number in numbers:
                chosen[number] = True
        return cls(np.packbits(chosen))

    def __len__(self) -> int:
        """Return how many rows are chosen."""
        return int(self._ends[-1])

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at ``places``, from 0, both int64 ``(n,)``."""
        blocks = np.searchsorted(self._ends, places, "right") - 1
        numbers = np.empty(len(places), np.int64)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            inside = np.flatnonzero(np.unpackbits(self.bits[block * BLOCK : (block + 1) * BLOCK]))
            numbers[here] = block * BLOCK * 8 + inside[places[here] - self._ends[block]]
        return numbers

    def before(self, number: int) -> int:
        """Return how many of the rows below ``number`` are chosen."""
        block, rest = divmod(number, BLOCK * 8)
        bits = np.unpackbits(self.bits[block * BLOCK : (block + 1) * BLOCK])
        return int(self._ends[block] + bits[:rest].sum(dtype=np.int64))

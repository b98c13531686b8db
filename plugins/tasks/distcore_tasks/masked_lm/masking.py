"""The masks of a row. They depend on seed, epoch and row only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distcore import row_random

HIDDEN, REPLACED = 0.8, 0.1
"""Fractions of the selected tokens that become the mask token, or a random
token. The others stay.
"""


def count_masked(probability: float, ordinary: np.ndarray) -> np.ndarray:
    """Return the number of masked tokens of each row, int64 ``(rows,)``. It is the same in every
    epoch.

    ``probability``: fraction of the ordinary tokens to predict. ``ordinary``: number of ordinary
    tokens of each row, int64 ``(rows,)``.
    """
    wanted = np.rint(probability * ordinary).astype(np.int64)
    counts: np.ndarray = np.minimum(np.maximum(wanted, 1), ordinary)
    return counts


@dataclass(frozen=True, kw_only=True, eq=False)
class Masking:
    """Settings of the masking."""

    mask: int
    """The mask token."""
    is_ordinary: np.ndarray
    """True for each token of the vocabulary that is not special, bool ``(largest token + 1,)``.
    Only these are masked, or replace others.
    """
    seed: int
    """Seed of the random masks."""

    def masked(
        self, tokens: np.ndarray, count: int, epoch: int, row: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the masked copy of a row, and the positions of its ``count`` tokens to predict.

        ``tokens``: those of the row, ``(tokens,)``. The same epoch and row give the same result.
        """
        random = row_random(self.seed, epoch, row)
        places = random.choice(
            np.flatnonzero(self.is_ordinary[tokens]), count, replace=False, shuffle=False
        )
        drawn, others = random.random(count), random.choice(self._ordinary, count)
        put = np.where(
            drawn < HIDDEN, self.mask, np.where(drawn < HIDDEN + REPLACED, others, tokens[places])
        )
        read = tokens.copy()
        read[places] = put
        return read, places

    @cached_property
    def _ordinary(self) -> np.ndarray:
        """The ordinary tokens, int64, ascending."""
        return np.flatnonzero(self.is_ordinary)

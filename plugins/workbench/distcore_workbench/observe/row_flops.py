"""Operations of the model by the length of a row, once they are counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RowFlops:
    """Operations of a row by its length: a polynomial of degree 2, which a transformer's is."""

    coefficients: tuple[float, ...]
    """Of the powers of the length, from 0 on; at most three."""

    def total(self, lengths: np.ndarray) -> float:
        """Return the operations of all rows of these lengths, forward and backward."""
        # In fp64: powers of integers could overflow.
        exact_lengths = lengths.astype(np.float64)
        total = 0.0
        for power, factor in enumerate(self.coefficients):
            total += factor * float((exact_lengths**power).sum())
        return total

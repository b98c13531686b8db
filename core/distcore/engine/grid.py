"""The grid of ``exact``: multiples of a power of two, which fp64 adds without rounding."""

from __future__ import annotations

import math

from torch import Tensor

MANTISSA = 53
"""Bits of an fp64 number: sums of multiples of 2**-n are exact below 2**(53 - n)."""
FINEST = 46
"""Gradients are multiples of 2**-46, which loses less than sums in fp32 do, for sums below 128."""
COARSER = 8
"""So many bits fewer has each coarser grid."""


def round_to_grid(values: Tensor, bits: int) -> Tensor:
    """Round fp64 ``values`` in place to multiples of ``2**-bits``, and return them.

    They were fp32: those too large for the sum below to round them have no finer digits anyhow.
    """
    shift = 1.5 * 2.0 ** (MANTISSA - 1 - bits)  # near it, the fp64 numbers are the grid
    return values.add_(shift).sub_(shift)


def bits_of_grid(greatest: float) -> int:
    """Return the bits of the finest grid on which sums up to ``greatest`` are exact.

    Without a number nothing can be exact, and the gradient shows it: the finest.
    """
    if not math.isfinite(greatest):
        return FINEST
    _, exponent = math.frexp(greatest)  # it is below 2**exponent
    too_many = max(0, FINEST + exponent - MANTISSA)
    return FINEST - COARSER * -(-too_many // COARSER)

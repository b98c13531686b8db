"""The numerical difference between two tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Difference(NamedTuple):
    """How far a tensor is from an expected one; infinite if their shapes differ."""

    largest: float
    """Largest absolute difference of two elements."""
    relative: float
    """L2 norm of the difference over that of the expected tensor, or over 1 if that is zero."""


def difference(actual: Tensor, expected: Tensor) -> Difference:
    """Compare two tensors of any shape and dtype, in float64 or complex128 on the CPU."""
    if actual.shape != expected.shape:
        return Difference(math.inf, math.inf)
    # An imaginary part would be lost in float64.
    wide = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    expected = expected.detach().cpu().to(wide)
    delta = actual.detach().cpu().to(wide) - expected
    largest = float(delta.abs().max()) if delta.numel() else 0.0
    norm = float(expected.norm()) or 1.0
    return Difference(largest, float(delta.norm()) / norm)

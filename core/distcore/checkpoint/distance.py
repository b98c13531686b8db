"""Numerical differences between two tensors, and between the tensors of two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from distcore.checkpoint.reader import Checkpoint


class Difference(NamedTuple):
    """How far a tensor is from an expected one; infinite if their shapes differ."""

    largest: float
    """Largest absolute difference of two elements."""
    relative: float
    """L2 norm of the difference, divided by the norm of the expected tensor, or by 1 if that is zero."""


def difference(actual: Tensor, expected: Tensor) -> Difference:
    """Compare two tensors of any shape and dtype, in float64 on the CPU."""
    if actual.shape != expected.shape:
        return Difference(math.inf, math.inf)
    expected = expected.detach().cpu().double()
    apart = actual.detach().cpu().double() - expected
    largest = float(apart.abs().max()) if apart.numel() else 0.0
    return Difference(largest, float(apart.norm()) / (float(expected.norm()) or 1.0))


def differing(one: Checkpoint, other: Checkpoint) -> Iterator[tuple[float, str]]:
    """Yield, for each tensor that differs, the largest difference and a line of text about it."""
    for name in sorted(set(one) | set(other)):
        if name not in one or name not in other:
            yield math.inf, f"{name}  only in {(one if name in one else other).path}"
            continue
        a, b = one[name], other[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield math.inf, f"{name}  {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)}"
        elif not torch.equal(a, b):
            error = difference(b, a)
            yield error.largest, f"{name}  largest difference {error.largest:.3g}, relative {error.relative:.3g}"

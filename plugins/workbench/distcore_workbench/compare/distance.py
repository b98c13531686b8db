"""The distance between the parameters of two checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from distcore.checkpoint import Checkpoint, difference

MODEL = "model/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """The difference between the parameters of a checkpoint and of a reference."""

    largest: float
    """Largest absolute difference of two elements."""
    relative: float
    """L2 norm of all differences, divided by the norm of all parameters of the reference."""
    tensor: str
    """Name of the tensor with the largest difference; empty if there is no difference."""


def distance(path: Path, reference: Path) -> Distance:
    """Compare the models of two checkpoints, one tensor at a time.

    The distance is infinite if names or shapes differ.
    """
    compared = Checkpoint(path)
    expected = Checkpoint(reference)
    names = {name for name in {*compared, *expected} if name.startswith(MODEL)}
    largest = 0.0
    largest_tensor = ""
    squared_difference = 0.0
    squared_norm = 0.0
    for name in sorted(names):
        tensor = name.removeprefix(MODEL)
        if not _has_same_shape(compared, expected, name):
            return Distance(largest=math.inf, relative=math.inf, tensor=tensor)
        values = expected[name].double()
        error = difference(compared[name], values)
        norm = float(values.norm())
        # The difference from a tensor of zeros is absolute: there is no norm to multiply with.
        squared_difference += (error.relative * (norm or 1.0)) ** 2
        squared_norm += norm**2
        if error.largest > largest or math.isnan(error.largest):  # NaN is not greater than anything
            largest = error.largest
            largest_tensor = tensor
    relative = math.sqrt(squared_difference / (squared_norm or 1.0))
    return Distance(largest=largest, relative=relative, tensor=largest_tensor)


def _has_same_shape(one: Checkpoint, other: Checkpoint, name: str) -> bool:
    """Return True if both checkpoints have the tensor, in one shape; reads no values."""
    if name not in one or name not in other:
        return False
    return one.entry(name).shape == other.entry(name).shape

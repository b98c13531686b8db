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
    """Compare the models of two checkpoints, one tensor at a time; infinite if
    names or shapes differ.
    """
    one, other = Checkpoint(path), Checkpoint(reference)
    names = {name for name in {*one, *other} if name.startswith(MODEL)}
    largest, where, apart, size = 0.0, "", 0.0, 0.0
    for name in sorted(names):
        if name not in one or name not in other or one.entry(name).shape != other.entry(name).shape:
            return Distance(largest=math.inf, relative=math.inf, tensor=name.removeprefix(MODEL))
        expected = other[name].double()
        error = difference(one[name], expected)
        norm = float(expected.norm())
        apart, size = apart + (error.relative * (norm or 1.0)) ** 2, size + norm**2
        if error.largest > largest or math.isnan(error.largest):  # NaN is not greater than anything
            largest, where = error.largest, name.removeprefix(MODEL)
    return Distance(largest=largest, relative=math.sqrt(apart / (size or 1.0)), tensor=where)

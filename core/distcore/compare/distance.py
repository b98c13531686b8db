"""How far the parameters of two checkpoints are from each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from distcore.checkpoint import Checkpoint

MODEL = "model/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """Between two models: the largest difference of an element, and the L2 norm of all differences."""

    largest: float
    relative: float
    """The norm of the differences over the norm of the reference, all parameters together."""
    tensor: str
    """Where the largest difference is; empty if there is none."""


def distance(path: Path, reference: Path) -> Distance:
    """Read both, a tensor at a time; infinite where they do not hold the same tensors."""
    one, other = Checkpoint(path), Checkpoint(reference)
    names = {name for name in {*one, *other} if name.startswith(MODEL)}
    largest, where, apart, size = 0.0, "", 0.0, 0.0
    for name in sorted(names):
        if name not in one or name not in other or one.entry(name).shape != other.entry(name).shape:
            return Distance(largest=math.inf, relative=math.inf, tensor=name.removeprefix(MODEL))
        expected = other[name].double()
        difference = one[name].double() - expected
        apart, size = apart + float(difference.square().sum()), size + float(expected.square().sum())
        most = float(difference.abs().max()) if difference.numel() else 0.0
        if most > largest or math.isnan(most):
            largest, where = most, name.removeprefix(MODEL)
    return Distance(largest=largest, relative=math.sqrt(apart / (size or 1.0)), tensor=where)
